"""Views of the API server's raw objects, for decisions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import msgspec

from tandem.operator.api.status import Reason
from tandem.operator.clock import parse_time
from tandem.operator.decide.scaling import is_full
from tandem.operator.desired.job import ANNOTATION_MADE_OF
from tandem.operator.desired.naming import Manifest, Role
from tandem.operator.desired.secrets import ANNOTATION_PUBLIC, LABEL_GENERATION
from tandem.operator.desired.workload import RevisionKey
from tandem.protocol import names


class Snapshot(msgspec.Struct, frozen=True):
    """Children by kind and name."""

    by_kind: dict[str, dict[str, Manifest]]

    def of(self, kind: str) -> Iterable[Manifest]:
        return self.by_kind.get(kind, {}).values()

    def names(self, kind: str) -> Iterable[str]:
        return self.by_kind.get(kind, {}).keys()

    def find(self, kind: str, name: str) -> Manifest | None:
        return self.by_kind.get(kind, {}).get(name)


_PULL = {"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"}
_REFUSED = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_CRASHES = 2
"""Restarts of a failed container from which it counts as crashing."""


class Problem(msgspec.Struct, frozen=True):
    """Reason why a pod does not serve."""

    reason: Reason
    message: str


class PodView(msgspec.Struct, frozen=True, kw_only=True):
    """Pod of a worker or router."""

    name: str
    uid: str
    ip: str | None
    node: str | None = None
    role: Role
    revision: str
    ready: bool
    deleting: bool
    created: float
    pending_since: float | None
    """Time at which the scheduler last found no node."""
    problem: Problem | None
    annotations: dict[str, str]
    key_generation: int | None


class WorkloadView(msgspec.Struct, frozen=True, kw_only=True):
    """One Deployment."""

    name: str
    asked: int
    existing: int
    refused: str | None
    """Reason why its pods cannot be created."""
    full_since: float | None = None
    """Time since which a quota has had no room for its pods."""
    is_followed: bool = True
    """Whether its controller has seen the wanted replicas."""


class JobView(msgspec.Struct, frozen=True, kw_only=True):
    """Job of the model."""

    name: str
    succeeded: bool
    failed: bool
    report: str | None
    """Termination message of its last ended pod."""
    problem: Problem | None
    waiting: tuple[str, float] | None = None
    """Last pod and its creation time, before any container has run."""
    podless_since: float | None = None
    """Creation time of the Job, while it has no pod."""
    made_of: str | None = None
    """The ``job_revision`` of its pods."""

    @property
    def has_begun(self) -> bool:
        """Return whether a container of its last pod has run."""
        return self.report is not None or (self.waiting is None and self.podless_since is None)


def labelled(item: Manifest) -> RevisionKey | None:
    """Return role and revision of a child, or None without labels."""
    labels = item["metadata"].get("labels") or {}
    try:
        return Role(labels[names.LABEL_ROLE]), labels[names.LABEL_REVISION]
    except (KeyError, ValueError):
        return None


def pods(items: Iterable[Manifest]) -> list[PodView]:
    """Return the pods of roles that have not ended."""
    views = [_pod(item, key) for item in items if (key := labelled(item)) is not None]
    return [view for view in views if view is not None]


def _pod(item: Manifest, key: RevisionKey) -> PodView | None:
    metadata, status = item["metadata"], item.get("status", {})
    if status.get("phase") in ("Succeeded", "Failed"):
        return None
    role, revision = key
    return PodView(
        name=metadata["name"],
        uid=metadata["uid"],
        ip=status.get("podIP"),
        node=item["spec"].get("nodeName"),
        role=role,
        revision=revision,
        ready=_condition(status, "Ready").get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        created=parse_time(metadata["creationTimestamp"]),
        pending_since=_pending_since(status),
        problem=pod_problem(status),
        annotations=metadata.get("annotations") or {},
        key_generation=generation_of(item),
    )


def _condition(status: Manifest, kind: str) -> Manifest:
    found: Manifest = next(
        (each for each in status.get("conditions") or () if each["type"] == kind), {}
    )
    return found


def _pending_since(status: Manifest) -> float | None:
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return parse_time(scheduled["lastTransitionTime"])
    return None


def pod_problem(status: Manifest) -> Problem | None:
    """Return the problem that keeps a pod from serving, by its status."""
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("reason") == "Unschedulable":
        return Problem(Reason.UNSCHEDULABLE, scheduled.get("message", ""))
    containers = [*(status.get("initContainerStatuses") or ())]
    containers += status.get("containerStatuses") or ()
    for container in containers:
        problem = _container_problem(container)
        if problem is not None:
            return problem
    return None


def _container_problem(container: Manifest) -> Problem | None:
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason, text = waiting.get("reason", ""), waiting.get("message", "")
    if reason in _PULL:
        return Problem(Reason.IMAGE_PULL, f"{container.get('image', '')}: {text or reason}")
    if reason in _REFUSED:
        return Problem(Reason.POD_REFUSED, text or reason)
    ended = container.get("lastState", {}).get("terminated") or state.get("terminated") or {}
    down = not container.get("ready") and "running" not in state
    if reason == "CrashLoopBackOff" or (down and container.get("restartCount", 0) >= _CRASHES):
        message = (ended.get("message") or ended.get("reason") or text or reason).strip()
        code = ended.get("exitCode")
        return Problem(
            Reason.CRASH_LOOP, f"container {container['name']} exits {code}: {message[-800:]}"
        )
    return None


def generation_of(item: Manifest) -> int | None:
    """Return the generation of keys that a pod or template mounts, or None."""
    for volume in item["spec"].get("volumes") or ():
        if volume["name"] == "tandem-keys":
            _, _, number = volume.get("secret", {}).get("secretName", "").rpartition("-g")
            return int(number) if number.isdecimal() else None
    return None


def workloads(items: Iterable[Manifest]) -> dict[RevisionKey, WorkloadView]:
    """Return the Deployments by role and revision."""
    views = {}
    for item in items:
        key = labelled(item)
        if key is None or "deletionTimestamp" in item["metadata"]:
            continue
        status = item.get("status", {})
        failure = _condition(status, "ReplicaFailure")
        refused = failure.get("message") if failure.get("status") == "True" else None
        full = refused is not None and is_full(refused)
        generation = item["metadata"].get("generation", 0)
        views[key] = WorkloadView(
            name=item["metadata"]["name"],
            asked=item["spec"].get("replicas", 1),
            existing=status.get("replicas", 0),
            refused=refused,
            full_since=parse_time(failure["lastTransitionTime"]) if full else None,
            is_followed=status.get("observedGeneration", 0) >= generation,
        )
    return views


def templates(items: Iterable[Manifest]) -> dict[RevisionKey, Manifest]:
    """Return the stored templates by role and revision."""
    return {
        key: item["data"]["template"]
        for item in items
        if (key := labelled(item)) is not None and "template" in (item.get("data") or {})
    }


def templates_of_deployments(items: Iterable[Manifest]) -> dict[RevisionKey, Manifest]:
    """Return the templates of the Deployments by role and revision."""
    return {
        key: item["spec"]["template"]
        for item in items
        if (key := labelled(item)) is not None and "template" in item["spec"]
    }


def published_keys(peers: Manifest | None) -> dict[tuple[Role, int], str]:
    """Return the public keys that pods get, by role and generation."""
    found = {}
    for name, public in ((peers or {}).get("data") or {}).items():
        role, _, number = name.removesuffix(".public").rpartition(".")
        with contextlib.suppress(ValueError):
            found[(Role(role), int(number))] = public
    return found


def held_keys(items: Iterable[Manifest]) -> dict[tuple[Role, int], str]:
    """Return the public keys of existing Secrets, by role and generation."""
    held = {}
    for item in items:
        metadata = item["metadata"]
        labels = metadata.get("labels") or {}
        public = (metadata.get("annotations") or {}).get(ANNOTATION_PUBLIC)
        number = labels.get(LABEL_GENERATION, "")
        if public is None or not number.isdecimal() or "deletionTimestamp" in metadata:
            continue
        with contextlib.suppress(ValueError):
            held[(Role(labels.get(names.LABEL_ROLE, "")), int(number))] = public
    return held


def job(item: Manifest | None, pods_of_all: Iterable[Manifest]) -> JobView | None:
    """Return the model's Job with its pods' report, without pods of earlier Jobs."""
    if item is None:
        return None
    status, metadata = item.get("status", {}), item["metadata"]
    report, problem, waiting = None, None, None
    mine = [pod for pod in pods_of_all if _is_owned(pod, metadata["uid"])]
    for pod in sorted(mine, key=lambda each: each["metadata"]["creationTimestamp"]):
        report = _termination_message(pod) or report
        problem = pod_problem(pod.get("status", {}))
        waiting = _waiting_since(pod)
    return JobView(
        name=metadata["name"],
        waiting=waiting,
        succeeded=_condition(status, "Complete").get("status") == "True",
        failed=_condition(status, "Failed").get("status") == "True",
        report=report,
        problem=problem,
        podless_since=None if mine else parse_time(metadata["creationTimestamp"]),
        made_of=(metadata.get("annotations") or {}).get(ANNOTATION_MADE_OF),
    )


def unfinished(jobs: Iterable[Manifest]) -> int:
    """Return the number of Jobs that have not ended."""
    return sum(
        not any(_condition(item.get("status", {}), kind) for kind in ("Complete", "Failed"))
        for item in jobs
    )


def _is_owned(item: Manifest, uid: str) -> bool:
    owners = item["metadata"].get("ownerReferences") or ()
    return any(each["uid"] == uid for each in owners)


def _waiting_since(pod: Manifest) -> tuple[str, float] | None:
    metadata = pod["metadata"]
    for container in pod.get("status", {}).get("containerStatuses") or ():
        if "waiting" not in container.get("state", {"waiting": {}}):
            return None
    return metadata["name"], parse_time(metadata["creationTimestamp"])


def _termination_message(pod: Manifest) -> str | None:
    for container in pod.get("status", {}).get("containerStatuses") or ():
        state: dict[str, Any] = container.get("state", {})
        message: str | None = state.get("terminated", {}).get("message")
        if message:
            return message
    return None
