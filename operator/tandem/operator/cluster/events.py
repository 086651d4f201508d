"""Kubernetes events about conditions and actions of the operator."""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from tandem.operator.api.status import Condition, ConditionType, Reason
from tandem.operator.api.values import API_VERSION
from tandem.operator.clock import time_text
from tandem.operator.desired.naming import MANAGER, Identity, Manifest

_BAD_WHEN_TRUE = {ConditionType.DEGRADED}
_PASSING = {
    Reason.CANARY_PENDING,
    Reason.CHECKING,
    Reason.FETCHING,
    Reason.STARTING,
    Reason.SUSPENDED,
}
"""Reasons that are temporary or requested: no warning."""
_UNREMARKABLE = _PASSING | {Reason.HEALTHY, Reason.NOT_NEEDED, Reason.STABLE}
"""Reasons without an event for a new service."""
_SILENT = {ConditionType.SCALING_ACTIVE, ConditionType.KV_FABRIC_READY}
_MAX_NOTE = 1024


def transitions(before: Iterable[Condition], after: Iterable[Condition]) -> list[Condition]:
    """Return the conditions whose status or reason changed, and that get an event."""
    known = {each.type: (each.status, each.reason) for each in before}
    changed = [each for each in after if known.get(each.type) != (each.status, each.reason)]
    return [
        each
        for each in changed
        if each.type not in _SILENT and (each.type in known or each.reason not in _UNREMARKABLE)
    ]


def event(owner: Identity, condition: Condition, now: float) -> Manifest:
    """Return an Event with a condition's new state."""
    bad = condition.status == ("True" if condition.type in _BAD_WHEN_TRUE else "False")
    waiting = condition.type == ConditionType.PROGRESSING or condition.reason in _PASSING
    text = f"{condition.type}={condition.status}: {condition.message}"
    kind = "Warning" if bad and not waiting else "Normal"
    return _event(owner, condition.reason, text, kind, now)


def warning(owner: Identity, reason: str, text: str, now: float) -> Manifest:
    """Return an Event with an action of the operator."""
    return _event(owner, reason, text, "Warning", now)


def _event(owner: Identity, reason: str, text: str, kind: str, now: float) -> Manifest:
    when = time_text(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{owner.name}.{secrets.token_hex(8)}",
            "namespace": owner.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": "LLMService",
            "name": owner.name,
            "namespace": owner.namespace,
            "uid": owner.uid,
        },
        "reason": reason,
        "message": text[:_MAX_NOTE],
        "type": kind,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
        "source": {"component": MANAGER},
        "reportingComponent": MANAGER,
    }
