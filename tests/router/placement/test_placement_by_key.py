"""Where requests go that belong to a query which one worker keeps."""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from tests.router.builders import STRICT, inc, view

from tandem.protocol.card import WorkerRole
from tandem.router.placement.snapshot import Exclusions, FleetSnapshot, PromptFacts

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


def place(key, workers, exclusions=Exclusions()):  # noqa: B008 - frozen
    """Return the worker that serves it alone."""
    facts = PromptFacts(num_tokens=9, max_new_tokens=1, one_token=True, pooled=True, query_key=key)
    fleet = FleetSnapshot(tuple(workers), frozenset())
    found = STRICT.place(facts, fleet, exclusions)
    if found is None:
        return None
    assert found.prefill is None
    return found.worker


def test_equal_keys_go_to_one_worker_whatever_its_load() -> None:
    """By the key's CRC32 over the prefill workers in their order; decode workers where there are
    no others."""
    idle = [replace(view(n, P), pools=True) for n in (1, 2, 3)]
    busy = [replace(each, num_waiting=n, waiting_tokens=900 * n) for n, each in enumerate(idle)]
    decode = replace(view(4, D), pools=True)
    keys = [f"query {n}" for n in range(60)]
    for key in keys:
        want = inc(1 + crc32(key.encode()) % 3)
        assert place(key, [*idle, decode]) == want
        assert place(key, [decode, *reversed(busy)]) == want
        assert place(key, [decode]) == inc(4)
    assert {place(key, idle) for key in keys} == {inc(1), inc(2), inc(3)}


def test_a_worker_that_failed_or_cannot_is_not_asked() -> None:
    """The others share its keys; nobody is nobody."""
    workers = [replace(view(n, P), pools=True) for n in (1, 2)]
    gone = Exclusions(workers=frozenset({inc(1)}))
    assert {place(f"{n}", workers, gone) for n in range(20)} == {inc(2)}
    assert place("a", [replace(workers[0], pools=False)]) is None
