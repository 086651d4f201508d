"""The revision of a role: a digest of the user's input, not of the rendered pod.

So an operator upgrade rolls nothing, and a change of one role rolls only that.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.values import digest
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.policy import draws_tokens, worker_role

KIND = "ControllerRevision"
_ESCAPED = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def as_go_writes(manifest: Manifest) -> Manifest:
    """Return a manifest; data of a ControllerRevision has Go's form."""
    if manifest.get("kind") != KIND or "data" not in manifest:
        return manifest
    return {**manifest, "data": msgspec.Raw(_encoded(manifest["data"]))}


def _encoded(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text.encode()


def in_order(value: Any) -> Any:
    """Return a value with sorted maps."""
    return msgspec.json.decode(msgspec.json.encode(value, order="sorted"))


def is_sorted(value: Any) -> bool:
    """Return whether all maps of a value are sorted."""
    return msgspec.json.encode(value) == msgspec.json.encode(value, order="sorted")


TEMPLATE_VERSION = 1
"""Version of templates; a new one rolls all pods."""


def revision_of(
    spec: LLMServiceSpec,
    role: Role,
    *,
    pinned: str | None,
    key_generation: int,
    wire: str | None = None,
) -> str:
    """Return the revision of a role.

    ``pinned`` is the commit of a moving source; ``wire`` is set if only it changes.
    """
    extras = [spec.image_pull_secrets, spec.labels, spec.annotations]
    shared = [
        TEMPLATE_VERSION,
        spec.model.digest,
        pinned,
        spec.model.name,
        spec.security.pod_security,
        spec.observability,
        spec.rollout.restart_id,
        key_generation,
        *([] if wire is None else [wire]),
        *([extras] if any(extras) else []),  # earlier digests have none
    ]
    own = _router_inputs(spec) if role is Role.ROUTER else _worker_inputs(spec, role)
    return digest([shared, own])


def _router_inputs(spec: LLMServiceSpec) -> list[Any]:
    router = spec.router
    return [
        spec.model.served_names,
        router.extra_args,
        router.resources,
        router.pod_template,
        router.queue,
        router.auth,
        router.max_stream_seconds,
        spec.disaggregation,
        spec.kv_transfer.failure_policy,
        *([] if draws_tokens(spec) else [spec.task]),  # earlier digests have no task
        *(
            ["grpc"] if router.service.grpc_port else []
        ),  # the port of the Service is not in the pods
    ]


def _worker_inputs(spec: LLMServiceSpec, role: Role) -> list[Any]:
    part = worker_role(spec, role)
    transfer = msgspec.to_builtins(spec.kv_transfer)
    return [
        spec.image,
        spec.engine,
        {**transfer, "preflight": {}},  # earlier releases had this map: equal specs roll no role
        part.parallelism,
        part.nodes_per_replica,
        part.resources,
        part.extra_args,
        part.drain_timeout_seconds,
        part.pod_template,
    ]


def service_revision(revisions: dict[str, str]) -> str:
    """Return one name for the revisions of all roles."""
    return digest(sorted(revisions.items()))
