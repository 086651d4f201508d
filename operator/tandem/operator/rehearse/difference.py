"""Differences of two objects of Kubernetes, as readable lines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

import msgspec

from tandem.operator.desired.naming import Manifest

_BOOKKEEPING = frozenset(
    {"managedFields", "resourceVersion", "generation", "uid", "creationTimestamp"}
)
"""Metadata that every write changes."""
_LONGEST = 200


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference in one field; None stands for an absent field."""

    path: str
    before: str | None
    after: str | None


def differences(before: Manifest, after: Manifest) -> list[Difference]:
    """Return the fields that differ, in the order of their names, without status and bookkeeping.

    Lists of named items (containers, volumes, ports) are compared by name, others as sequences.
    """
    return list(_walk("", _content(before), _content(after)))


def _content(item: Manifest) -> Manifest:
    metadata = {k: v for k, v in item.get("metadata", {}).items() if k not in _BOOKKEEPING}
    left_out = ("status", "apiVersion", "kind", "metadata")
    return {"metadata": metadata, **{k: v for k, v in item.items() if k not in left_out}}


def _walk(path: str, before: Any, after: Any) -> Iterator[Difference]:
    if before == after:
        return
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}.{key}" if path else key
            yield from _walk(inner, before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _walk_lists(path, before, after)
    else:
        yield Difference(path=path, before=_shown(before), after=_shown(after))


def _walk_lists(path: str, before: Sequence[Any], after: Sequence[Any]) -> Iterator[Difference]:
    olds, news = _by_name(before), _by_name(after)
    if olds is not None and news is not None:
        for name in sorted(olds.keys() | news.keys()):
            yield from _walk(f"{path}[{name}]", olds.get(name), news.get(name))
        return
    old, new = [_shown(each) or "" for each in before], [_shown(each) or "" for each in after]
    for kind, start, end, begin, stop in SequenceMatcher(None, old, new, False).get_opcodes():
        if kind != "equal":
            gone, come = " ".join(old[start:end]), " ".join(new[begin:stop])
            yield Difference(path=path, before=gone or None, after=come or None)


def _by_name(items: Sequence[Any]) -> dict[str, Any] | None:
    """Return the items by their names; None if they have none, or one twice."""
    named = {each["name"]: each for each in items if isinstance(each, dict) and "name" in each}
    return named if len(named) == len(items) else None


def _shown(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
