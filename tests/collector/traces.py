"""Traces out of a collector's file, and whether one is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

EARLY_SECONDS = 0.005
"""A worker's note may lie so far before what the router noted: halves of ways are guessed."""


class Span(NamedTuple):
    """One span; times in seconds on the wall clock."""

    trace: str
    id: str
    parent: str
    name: str
    service: str
    begin: float
    end: float
    error: str
    """Its message; empty for one that went well."""
    events: tuple[tuple[float, str], ...]
    attributes: dict[str, Any]
    pod: str = ""
    """Of the process that made it, as its resource says."""


def read(file: Path) -> list[Span]:
    """All whole lines of a collector's file; none where it is not there yet."""
    if not file.is_file():
        return []
    return parsed(file.read_text())


def parsed(text: str) -> list[Span]:
    """All whole lines of what a collector wrote."""
    lines = text.split("\n")[:-1]  # the last one may not be whole
    return [span for line in lines if line for span in _spans(json.loads(line))]


def of(spans: list[Span], trace: str) -> list[Span]:
    """Those of one trace in the order of a tree: parents, then children, the first begun first."""
    mine = sorted((each for each in spans if each.trace == trace), key=lambda span: span.begin)
    return [span for span, _ in tree(mine)]


def tree(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    """Spans with their depths; whose parent is not among them is a root."""
    known = {each.id for each in spans}

    def below(parent: Span, depth: int) -> Iterator[tuple[Span, int]]:
        yield parent, depth
        for each in spans:
            if each.parent == parent.id:
                yield from below(each, depth + 1)

    for each in spans:
        if each.parent not in known:
            yield from below(each, 0)


def faults(spans: list[Span], parents: dict[str, tuple[str, ...]]) -> list[str]:
    """Why a trace is not whole: ``parents`` are the names that each name may stand under."""
    known = {each.id: each for each in spans}
    found = [f"no span {name}" for name in parents if name not in {each.name for each in spans}]
    roots = [each.name for each in spans if each.parent not in known]
    if len(roots) != 1:
        found.append(f"roots: {', '.join(roots) or 'none'}")
    for each in spans:
        parent = known.get(each.parent)
        if each.end < each.begin:
            found.append(f"{each.name} ends before it begins")
        if parent is None:
            continue
        if parent.name not in parents.get(each.name, ()):
            found.append(f"{each.name} stands under {parent.name}")
        if each.begin < parent.begin - EARLY_SECONDS:
            found.append(f"{each.name} begins before {parent.name}")
    return found


def strangers(spans: list[Span], pods: dict[str, set[str]]) -> list[str]:
    """Spans that do not name a pod of their service: ``pods`` are the names of each service's."""
    made = sorted({(each.service, each.pod) for each in spans})
    return [
        f"spans of {service} name the pod {pod or '(none)'}, not one of {sorted(pods[service])}"
        for service, pod in made
        if pod not in pods[service]
    ]


_CALL, _ATTEMPT = ("text_completion",), ("attempt",)
PARENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("read body", "parse", "tokenize", "admission", "place"), _CALL),
    **dict.fromkeys(("attempt", "stream"), _CALL),
    **dict.fromkeys(("prefill", "decode"), _ATTEMPT),
    "queue": ("prefill", "decode"),
    "chunk": ("prefill",),
    **dict.fromkeys(("hand-off", "tokens"), ("decode",)),
    **dict.fromkeys(("wait", "reserve", "load", "commit"), ("hand-off",)),
}
"""Of a completion by a prefill and a decode worker: docs/tracing.md draws it."""


def _spans(message: dict[str, Any]) -> Iterator[Span]:
    for resource in message.get("resourceSpans", ()):
        maker = _attributes(resource["resource"].get("attributes", ()))
        for scope in resource["scopeSpans"]:
            for each in scope["spans"]:
                status = each.get("status", {})
                error = status.get("message", "failed") if status.get("code") == 2 else ""
                events = tuple(
                    (int(event["timeUnixNano"]) / 1e9, event["name"])
                    for event in each.get("events", ())
                )
                yield Span(
                    each["traceId"],
                    each["spanId"],
                    each.get("parentSpanId", ""),
                    each["name"],
                    maker["service.name"],
                    int(each["startTimeUnixNano"]) / 1e9,
                    int(each["endTimeUnixNano"]) / 1e9,
                    error,
                    events,
                    _attributes(each.get("attributes", ())),
                    maker.get("k8s.pod.name", ""),
                )


def _attributes(listed: Any) -> dict[str, Any]:
    return {each["key"]: next(iter(each["value"].values()), None) for each in listed}
