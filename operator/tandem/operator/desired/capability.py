"""What this version cannot do though the resource can say it: refused in words, not ignored.

The API server checks shapes (``api.rules``); this checks the release. Pure; called by
``reconcile``.
"""

from __future__ import annotations

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.transfer import Connector, NodeLocalCopy, PreflightMode
from tandem.operator.desired.naming import WORKERS, Role
from tandem.operator.desired.policy import worker_role


def unsupported(spec: LLMServiceSpec) -> str | None:
    """What this version cannot do, naming the field, or None."""
    for role in WORKERS:
        problem = _of_role(spec, role)
        if problem is not None:
            return problem
    if spec.model.source.http is not None:
        return "spec.model.source.type: HTTP is not in this version; use Image or a volume"
    transfer = spec.kv_transfer
    if transfer.connector is Connector.CUDA_P2P:
        return "spec.kvTransfer.connector: CudaP2P is not in this version; use Auto, NIXL or TCP"
    if transfer.preflight.mode is PreflightMode.REQUIRE:
        return "spec.kvTransfer.preflight.mode: Require is not in this version; use Warn or Off"
    if transfer.node_local.copy_mode is NodeLocalCopy.AGENT:
        return "spec.kvTransfer.nodeLocal.copy: Agent is not in this version; use Auto or Direct"
    return None


def _of_role(spec: LLMServiceSpec, role: Role) -> str | None:
    part = worker_role(spec, role)
    field = f"spec.{role}"
    if (part.nodes_per_replica or 1) > 1:
        return f"{field}.nodesPerReplica: this version runs a replica on one node; use 1"
    for name in ("pipeline", "data"):
        if (getattr(part.parallelism, name) or 1) > 1:
            return f"{field}.parallelism.{name}: not in this version; use 1"
    return None
