"""Pure mapping of pods to workers: their addresses, and a pod's facts of its worker.

A pod is known by its UID: a successor at the same address is another pod. ``kubernetes`` brings the
objects, the pool gets the difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tandem.protocol.names import (
    ANNOTATION_ADMITTED,
    ANNOTATION_DRAINING,
    LABEL_REVISION,
    LABEL_ROLE,
    WORKER_PORT,
)
from tandem.router.workers.note import WorkerNote

Pod = Mapping[str, Any]
"""A Pod as the API server's JSON has it."""
_ENDED = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class PodFacts:
    """Facts of one pod that discovery uses."""

    uid: str
    created: str
    endpoint: str | None
    """``host:port`` of its worker; None while it has no address or after its end."""
    note: WorkerNote
    leave_ms: int | None = None
    """Milliseconds until a pod that is being deleted is killed, by the given clock."""


def facts_of(pod: Pod, now: datetime | None = None) -> PodFacts:
    """Return the facts of a pod. ``now`` is compared with its deletion's time. The rest is never
    more than its grace period, so that a wrong clock makes a drain shorter and not longer."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    annotations = metadata.get("annotations") or {}
    address: str | None = status.get("podIP")
    ended = status.get("phase") in _ENDED
    leave_ms = _leave_ms(metadata, now or datetime.now(UTC))
    note = WorkerNote(
        pod=metadata["name"],
        role=labels.get(LABEL_ROLE, ""),
        revision=labels.get(LABEL_REVISION, ""),
        admitted=annotations.get(ANNOTATION_ADMITTED) == "true",
        leaving=leave_ms is not None or annotations.get(ANNOTATION_DRAINING) == "true",
    )
    return PodFacts(
        uid=metadata["uid"],
        created=metadata.get("creationTimestamp") or "",
        endpoint=None if ended or not address else _endpoint(address),
        note=note,
        leave_ms=leave_ms,
    )


def _endpoint(address: str) -> str:
    return f"[{address}]:{WORKER_PORT}" if ":" in address else f"{address}:{WORKER_PORT}"


def _leave_ms(metadata: Mapping[str, Any], now: datetime) -> int | None:
    ends = metadata.get("deletionTimestamp")
    if ends is None:
        return None
    grace = int(metadata.get("deletionGracePeriodSeconds") or 0)
    left = (datetime.fromisoformat(ends) - now).total_seconds()
    return round(1000 * min(max(left, 0.0), grace))


class PodBook:
    """All pods of one selector, by UID."""

    def __init__(self) -> None:
        self._pods: dict[str, PodFacts] = {}

    def replace(self, pods: Iterable[Pod]) -> None:
        """Replace all pods by a full list: those that are not in it are removed."""
        self._pods = {facts.uid: facts for facts in map(facts_of, pods)}

    def apply(self, kind: str, pod: Pod) -> None:
        """Apply an event of a watch: ADDED, MODIFIED or DELETED."""
        if kind == "DELETED":
            self._pods.pop(pod["metadata"]["uid"], None)
        elif kind in ("ADDED", "MODIFIED"):
            facts = facts_of(pod)
            self._pods[facts.uid] = facts

    def by_endpoint(self) -> dict[str, PodFacts]:
        """Return the pod at each address: of two with the same one, the younger."""
        found: dict[str, PodFacts] = {}
        for facts in sorted(self._pods.values(), key=lambda each: (each.created, each.uid)):
            if facts.endpoint is not None:
                found[facts.endpoint] = facts
        return found
