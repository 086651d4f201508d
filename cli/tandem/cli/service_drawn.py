"""Text about an operator's plan for a service: changes, new revisions, conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.operator.api.status import Condition
from tandem.operator.rehearse.difference import Difference
from tandem.operator.rehearse.rehearsal import Rehearsal
from tandem.operator.rehearse.stage import Change

MAX_FIELDS = 40
"""Maximum fields of one object, or of one revision's pods."""
_SIGNS = {"create": "+", "update": "~", "delete": "-"}
_GOOD = {"Progressing": "False", "Degraded": "False", "ScalingActive": "False"}
"""Conditions whose good status is not True."""


def drawn(found: Rehearsal, file: str | None) -> str:
    """Return the whole text."""
    blocks = (_head(found, file), _changes(found), _revisions(found), _conditions(found))
    return "\n".join(line.rstrip() for block in blocks for line in block)


def _head(found: Rehearsal, file: str | None) -> Iterator[str]:
    if file is None:
        yield f"LLMService {found.service}, generation {found.generation}, as it is now"
    elif found.exists:
        yield f"LLMService {found.service}, as {file} would make it (nothing is written)"
        yield from _fields(found.spec, "  ") if found.spec else ("  the file changes nothing",)
    else:
        yield f"LLMService {found.service}, which is not there, as {file} would make it"
    summary = found.after.summary
    parts = {"prefill": summary.prefill, "decode": summary.decode, "router": summary.router}
    said = ", ".join(f"{name} {value}" for name, value in parts.items() if value)
    if said:
        yield f"ready of wanted: {said}; links {summary.links}"
    yield ""


def _changes(found: Rehearsal) -> Iterator[str]:
    if not found.changes:
        yield "The operator would change nothing."
    else:
        count = len(found.changes)
        yield f"The operator would make {count} change{'s' if count > 1 else ''}, in this order:"
    for change in found.changes:
        yield f"  {_SIGNS[change.verb]} {change.verb} {change.kind} {change.name}{_of(change)}"
        yield from _fields(change.differences, "      ")
    yield ""


def _of(change: Change) -> str:
    return ":" if change.differences else ""


def _revisions(found: Rehearsal) -> Iterator[str]:
    for each in found.revisions:
        if each.before is None:
            yield f"New revision of {each.role}: {each.after}, its first"
        else:
            yield f"New revision of {each.role}: {each.before} -> {each.after}; its pods differ in"
            yield from _fields(each.differences, "      ")
    if found.revisions:
        yield ""


def _fields(differences: Sequence[Difference], indent: str) -> Iterator[str]:
    for each in differences[:MAX_FIELDS]:
        before = "(nothing)" if each.before is None else each.before
        after = "(nothing)" if each.after is None else each.after
        yield f"{indent}{each.path}: {before} -> {after}"
    if len(differences) > MAX_FIELDS:
        yield f"{indent}... {len(differences) - MAX_FIELDS} fields more"


def _conditions(found: Rehearsal) -> Iterator[str]:
    """Yield the conditions that would change, then those that keep the service from being ready."""
    before = {each.type: each for each in found.before.conditions}
    moved = [each for each in found.after.conditions if _said(each) != _said(before.get(each.type))]
    if moved:
        yield "Its conditions would become:"
        for each in moved:
            old = before.get(each.type)
            was = "not told yet" if old is None else f"{old.status} {old.reason}"
            yield f"  {each.type}: {was} -> {each.status} {each.reason}"
            yield f"      {each.message}"
    known = {each.type for each in moved}
    open_ones = [
        each for each in found.after.conditions if _is_open(each) and each.type not in known
    ]
    if open_ones:
        yield "Why it is not at rest:"
        for each in open_ones:
            yield f"  {each.type} {each.status} {each.reason}: {each.message}"
    if not moved and not open_ones:
        yield "Every condition is well and would stay so."


def _said(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.status, condition.reason)


def _is_open(condition: Condition) -> bool:
    return condition.status != _GOOD.get(condition.type, "True")
