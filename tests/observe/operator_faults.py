"""Faults of services and of operators, and the alerts that each has to fire.

They are made beside a real API server, Kubernetes' controllers and real operators. Pods get their
status from a stand-in for nodes (tests/operator/node.py): what a kubelet would say of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.operator.harness import Harness, OperatorProcess
from tests.operator.node import FakeRouter, Node, Pod, container_status, unschedulable, waiting
from tests.operator.silent import Silent, routers_apart

from tandem.protocol import names

SETTINGS = {"rolloutStuckAfter": "3m", "modelNotReadyAfter": "3m", "keysOldAfterDays": 0.001}
"""Of the chart's rules, so that nobody waits for half an hour; all else is as it comes."""
WAITS = {"TandemKeysOld": "2m"}
"""Waits of rules (``for``) that are not those of the chart, which has an hour here."""
TIMINGS = {
    "canary_seconds": 5,
    "key_publish_seconds": 1,
    "lease_seconds": 60,
    "renew_deadline": 40,
    "retry_seconds": 5,
}
"""Of all operators here. A machine so loaded that the Lease is not renewed in time is no fault that
is asked for, and nobody starts an operator again here as a kubelet would."""
KUBELET_PAUSES = (10.0, 30.0, 70.0, 150.0, 310.0, 610.0, 910.0)
"""Seconds after which a kubelet starts a container again that ends at once: it doubles its pause
up to five minutes."""
MISSING = {"ok": False, "reason": "ModelNotFound", "message": "there is no folder /models/x"}


class Ground(NamedTuple):
    """Where faults are made: a namespace, its operator, and what stands in for nodes there."""

    harness: Harness
    operator: OperatorProcess
    node: Node
    router: FakeRouter
    open_: ExitStack
    """Closed when the operator ends."""


Strike = Callable[[Ground], None]


@dataclass(frozen=True)
class Fault:
    """One fault of one service, or of the operator itself."""

    name: str
    """Of its service."""
    text: str
    """In words, for the page."""
    fires: str
    strike: Strike
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the service's spec, as it is created."""
    waits: bool = True
    """Whether the service is to be ready before."""
    of_operator: bool = False
    """Whether the alert names no service."""


@dataclass(frozen=True)
class Stage:
    """Faults that share an operator and a Prometheus; a fault of the operator wants its own."""

    name: str
    faults: tuple[Fault, ...]


def fired() -> set[str]:
    """Alerts that a fault here has to fire."""
    return {fault.fires for stage in STAGES for fault in stage.faults}


def answer_wrongly(ground: Ground) -> None:
    ground.router.wrong_models.add("wrong")


def roll_to_nothing(name: str) -> Strike:
    """A new revision whose image cannot be pulled."""

    def strike(ground: Ground) -> None:
        known = set(ground.harness.service(name)["status"]["rollout"]["targets"].values())

        def broken(pod: Pod) -> Pod | None:
            revision = pod["metadata"]["labels"].get(names.LABEL_REVISION)
            if not of(pod, name) or revision is None or revision in known:
                return None
            return waiting("ImagePullBackOff", "registry.example.com/worker:none not found")

        ground.node.rules.append(broken)
        ground.harness.change({"spec": {"image": "registry.example.com/worker:none"}}, name)

    return strike


def lose_model(ground: Ground) -> None:
    """Its folder is not on the volume."""

    def missing(pod: Pod) -> Pod | None:
        if not of(pod, "modelless"):
            return None
        ended = {"exitCode": 1, "message": json.dumps(MISSING)}
        container = container_status("fetch", {"terminated": ended})
        return {"phase": "Failed", "containerStatuses": [container]}

    ground.node.rules.append(missing)
    ground.harness.create("modelless", model__name="modelless")


def lose_node(ground: Ground) -> None:
    """A decode pod goes with its node, and the one that follows finds none."""
    here = pods(ground, "degraded", "decode")
    known = {pod["metadata"]["uid"] for pod in here}

    def homeless(pod: Pod) -> Pod | None:
        is_new = pod["metadata"]["uid"] not in known
        decode = pod["metadata"]["labels"].get(names.LABEL_ROLE) == "decode"
        return unschedulable(pod) if of(pod, "degraded") and decode and is_new else None

    ground.node.rules.append(homeless)
    words = ("--grace-period=0", "--force", "--wait=false")
    ground.harness.kubectl("delete", "pod", here[0]["metadata"]["name"], *words)


def end_again_and_again(ground: Ground) -> None:
    """A decode container ends as soon as it has begun; in between its pod is ready."""
    begun = time.monotonic()
    chosen = pods(ground, "ending", "decode")[0]["metadata"]["uid"]

    def ending(pod: Pod) -> Pod | None:
        if pod["metadata"]["uid"] != chosen:
            return None
        count = sum(time.monotonic() - begun > pause for pause in KUBELET_PAUSES)
        status = container_status("worker", {"running": {}}, restartCount=count)
        return {**ground.node.ready(pod), "containerStatuses": [status]}

    ground.node.rules.append(ending)


def lose_router(ground: Ground) -> None:
    """The node of one of two routers falls silent, with its kubelet."""
    ground.open_.callback(Silent().wake)
    routers = ground.open_.enter_context(routers_apart(ground.harness, ground.node))
    routers.kubelet_lives = False


def nothing(_: Ground) -> None:
    """The fault is that nobody does anything."""


def refuse_writes(ground: Ground) -> None:
    """A policy of somebody's refuses what the operator writes, and its one service changes."""
    space = ground.harness.namespace
    rules = [
        {
            "apiGroups": [group],
            "apiVersions": ["*"],
            "resources": ["*/*"],
            "operations": ["CREATE", "UPDATE"],
        }
        for group in ("", "apps", "batch", "tandem.dev")
    ]
    chosen = {"matchLabels": {"kubernetes.io/metadata.name": space}}
    me = [{"name": "operator", "expression": "request.userInfo.username == 'operator'"}]
    policy: dict[str, Any] = {
        "matchConstraints": {"namespaceSelector": chosen, "resourceRules": rules},
        "matchConditions": me,
        "validations": [{"expression": "false", "message": "closed for the night"}],
    }
    binding = {"policyName": "closed", "validationActions": ["Deny"]}
    _admission(ground, "ValidatingAdmissionPolicy", policy)
    _admission(ground, "ValidatingAdmissionPolicyBinding", binding)
    probe = ("create", "configmap", "probe", "--as=operator", "--as-group=system:masters")

    def is_closed() -> bool:
        return "closed" in ground.harness.kubectl(*probe, "--dry-run=server", check=False)

    ground.harness.wait_for(is_closed)
    ground.harness.change({"spec": {"engine": {"maxNumSeqs": 7}}}, "refused")


def kill_operator(ground: Ground) -> None:
    ground.operator.kill()


def _admission(ground: Ground, kind: str, spec: dict[str, Any]) -> None:
    api = "admissionregistration.k8s.io/v1"
    item = {"apiVersion": api, "kind": kind, "metadata": {"name": "closed"}, "spec": spec}
    ground.harness.kubectl("create", "-f", "-", stdin=json.dumps(item))


def of(pod: Pod, name: str) -> bool:
    """Whether a pod is of the service of that name."""
    return bool(pod["metadata"]["labels"].get(names.LABEL_SERVICE) == name)


def pods(ground: Ground, name: str, role: str) -> list[Pod]:
    chosen = f"{names.LABEL_SERVICE}={name},{names.LABEL_ROLE}={role}"
    return ground.harness.cluster.items("Pod", ground.harness.namespace, chosen)


STAGES = (
    Stage(
        "served",
        (
            Fault(
                "wrong",
                "answers after a hand-off are wrong",
                "TandemCanaryWrong",
                answer_wrongly,
                {"model__name": "wrong"},
            ),
            Fault(
                "stuck",
                "a new revision's image cannot be pulled, and its deadline is an hour",
                "TandemRolloutStuck",
                roll_to_nothing("stuck"),
                {"rollout__progressDeadlineSeconds": 3600},
            ),
            Fault(
                "failed",
                "a new revision's image cannot be pulled, and its deadline is 20 s",
                "TandemRolloutFailed",
                roll_to_nothing("failed"),
                {"rollout__progressDeadlineSeconds": 20},
            ),
            Fault(
                "modelless",
                "the model's folder is not on its volume",
                "TandemModelNotReady",
                lose_model,
                waits=False,
            ),
            Fault(
                "degraded",
                "a decode pod's node is lost, and its successor cannot be scheduled",
                "TandemServiceDegraded",
                lose_node,
                {"decode__replicas": 2},
            ),
            Fault("keys", "the keys are not rotated", "TandemKeysOld", nothing),
            Fault(
                "ending",
                "a decode container exits at start, after 10, 30, 70 and 150 s",
                "TandemPodsRestarting",
                end_again_and_again,
            ),
        ),
    ),
    Stage(
        "refused",
        tuple(
            Fault(
                "refused",
                "an admission policy refuses every write of the operator, and its service changes",
                alert,
                strike,
                of_operator=True,
            )
            for alert, strike in (
                ("TandemOperatorErrors", refuse_writes),
                ("TandemOperatorStale", nothing),
            )
        ),
    ),
    Stage(
        "silent",
        (
            Fault(
                "demo",
                "the node of one of two routers loses power",
                "TandemRouterSilent",
                lose_router,
                of_operator=True,
            ),
        ),
    ),
    Stage(
        "killed",
        (
            Fault(
                "left",
                "the only operator is killed",
                "TandemOperatorWithoutLeader",
                kill_operator,
                of_operator=True,
            ),
        ),
    ),
)
