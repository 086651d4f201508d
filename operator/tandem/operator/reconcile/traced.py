"""Traces of passes that wrote or failed, and of work outside passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from tandem.operator.cluster import KINDS
from tandem.operator.look import ApiCall, Key, LookRecord, Phase, recording
from tandem.tracing.spans import OpenSpan, Spans

_KINDS = {(prefix, plural): kind for kind, (prefix, plural) in KINDS.items()}
_VERBS = {"GET": "get", "POST": "create", "PUT": "replace", "DELETE": "delete"}
_APPLY = "application/apply-patch"
_FAILED = 400
_ABSENT = 404
"""Status that is not a failure of a read or a deletion."""


class Target(NamedTuple):
    """Target of a call to the API server; missing parts are empty."""

    kind: str
    namespace: str
    name: str
    subresource: str


class Tracer:
    """Tracer of a process. Thread-safe."""

    def __init__(self, spans: Spans | None) -> None:
        """None makes no spans."""
        self._spans = spans

    def looks(
        self, reconcile: Callable[[Key], float | None], why: Callable[[Key], Iterable[str]]
    ) -> Callable[[Key], float | None]:
        """Return ``reconcile`` with a trace of each notable pass.

        ``why`` returns the reasons of the current pass.
        """
        if self._spans is None:
            return reconcile

        def look(key: Key) -> float | None:
            with self._record("reconcile", key, why(key)) as record:
                record.again = reconcile(key)
            return record.again

        return look

    @contextmanager
    def beside(self, name: str, key: Key, why: Iterable[str]) -> Iterator[None]:
        """Return a context of work outside passes, with a trace."""
        if self._spans is None:
            yield
            return
        with self._record(name, key, why):
            yield

    @contextmanager
    def _record(self, name: str, key: Key, why: Iterable[str]) -> Iterator[LookRecord]:
        assert self._spans is not None, "asked for only where there are spans"
        record = LookRecord(name, key, tuple(sorted(why)))
        try:
            with recording(record):
                yield record
        finally:
            if record.is_notable:
                self._spans.later(partial(write_spans, self._spans, record))

    def close(self) -> None:
        """Send the remaining spans, within a few seconds."""
        if self._spans is not None:
            self._spans.close()


def write_spans(spans: Spans, record: LookRecord) -> None:
    """Write the trace of a pass, its phases, and their calls."""
    offset = record.started - record.began
    end = record.ended if record.ended is not None else record.began
    root = spans.begin(record.name, record.started, "", kind="internal")
    if root.sampled:
        for phase in record.phases:
            _write_phase(root, record, phase, offset)
        _write_calls(root, record, None, offset)
    root.end(end + offset, _attributes(record), record.failure)


def _write_phase(root: OpenSpan, record: LookRecord, phase: Phase, offset: float) -> None:
    assert phase.end is not None, "a record that is over has no open phase"
    span = root.child(phase.name, phase.begin + offset)
    _write_calls(span, record, phase, offset)
    attributes = (
        {"error.type": record.failure_type} if phase.failure and record.failure_type else None
    )
    span.end(phase.end + offset, attributes, phase.failure)


def _write_calls(parent: OpenSpan, record: LookRecord, phase: Phase | None, offset: float) -> None:
    for call in record.calls:
        if call.phase is phase:
            _write_call(parent, call, offset)


def _write_call(parent: OpenSpan, call: ApiCall, offset: float) -> None:
    target = target_of(call.path)
    attributes: dict[str, str | int | bool] = {
        "http.request.method": call.method,
        "http.response.status_code": call.status,
        "tandem.object.kind": target.kind,
        "tandem.object.namespace": target.namespace,
        "tandem.object.name": target.name or call.name,
    }
    if target.subresource:
        attributes["tandem.object.subresource"] = target.subresource
    if call.dry_run:
        attributes["tandem.dry_run"] = True
    error = _error_of(call)
    if error is not None:
        attributes["error.type"] = str(call.status) if call.status else "no answer"
    span = parent.child(f"{verb_of(call)} {target.kind}", call.begin + offset, "client")
    span.end(call.end + offset, attributes, error)


def _error_of(call: ApiCall) -> str | None:
    if not call.status:
        return "no answer"
    absent = call.status == _ABSENT and call.method in ("GET", "DELETE")
    return None if call.status < _FAILED or absent else f"status {call.status}"


def _attributes(record: LookRecord) -> dict[str, str | int | float | list[str]]:
    namespace, name = record.key
    attributes: dict[str, str | int | float | list[str]] = {
        "tandem.service.namespace": namespace,
        "tandem.service.name": name,
        "tandem.reconcile.reasons": list(record.why),
        "tandem.reconcile.outcome": "wrote" if record.failure is None else "failed",
        "tandem.reconcile.num_writes": record.num_writes,
        "tandem.reconcile.num_reads": record.num_reads,
    }
    if record.generation is not None:
        attributes["tandem.service.generation"] = record.generation
    if record.again is not None:
        attributes["tandem.reconcile.again_seconds"] = record.again
    if record.dropped:
        attributes["tandem.reconcile.num_dropped"] = record.dropped
    if record.failure_type is not None:
        attributes["error.type"] = record.failure_type
    return attributes


def verb_of(call: ApiCall) -> str:
    """Return Kubernetes' verb of a call."""
    if call.method == "PATCH":
        return "apply" if call.content_type.startswith(_APPLY) else "patch"
    return _VERBS.get(call.method, call.method.lower())


def target_of(path: str) -> Target:
    """Return the target of a path: /prefix[/namespaces/NAMESPACE]/plural[/name[/subresource]]."""
    parts = path.strip("/").split("/")
    depth = 2 if parts[0] == "api" else 3
    prefix, rest = "/" + "/".join(parts[:depth]), parts[depth:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    plural, name, subresource = [*rest, "", "", ""][:3]
    return Target(_KINDS.get((prefix, plural), plural), namespace, name, subresource)
