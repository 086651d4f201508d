"""What a decode worker says of its links: their pace, what waits, and what is slow."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.kvtransfer.machines import GROUP, P_INC, TOKEN, A, make_key

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.control.client import PeerBook
from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.manifest import manifest
from tandem.kvtransfer.handoff.messages import Final
from tandem.kvtransfer.handoff.pull import Flight, Pull
from tandem.kvtransfer.handoff.tables import DState
from tandem.kvtransfer.memory.slots import slot_sizes
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.mover.throughput import (
    IDLE_SECONDS,
    PHASES_OF_WAITING,
    WARN_SECONDS,
    Throughput,
    phase_of,
)
from tandem.protocol.ids import RequestKey

TOKEN_BYTES = 1000
PART = Flight(0, 0, 64, 0, 64_000, 0)


def pull(key: RequestKey = A, **changes: object) -> Pull:
    """A hand-off of 640 tokens, all announced, none here."""
    fields: dict[str, Any] = {
        "state": DState.PULLING,
        "num_tokens": 640,
        "upto": 640,
        "start": 0,
        "items": manifest((GROUP,), 640),
        "reached": (0,),
        **changes,
    }
    final = Final(key, TOKEN, None)
    never = Millis(10**9)
    return Pull(key=key, producer=P_INC, budget=never, deadline=never, final=final, **fields)


class Watched:
    """A pace over virtual seconds, and what it says."""

    def __init__(self, slow_seconds: float = 1.0) -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        self.book = PeerBook()
        self.book.mark(P_INC, up=True, transport="tcp")
        self.throughput = Throughput(
            metrics_of(self.registry),
            self.book,
            token_bytes=TOKEN_BYTES,
            slow_seconds=slow_seconds,
            clock=lambda: self.now,
        )
        self.pulls: dict[RequestKey, Pull] = {}

    def begin(self, each: Pull) -> None:
        """Its prompt is done from here on."""
        self.pulls[each.key] = each
        self.throughput.begin(each.key)
        self.throughput.final(each.key)

    def wait(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.throughput.look(self.pulls)

    def slow(self, phase: str) -> float:
        found = self.registry.get_sample_value("tandem:kv_slow_handoffs_total", {"phase": phase})
        return found or 0.0


def test_a_links_pace_is_bytes_over_the_time_in_which_some_waited():
    """Idle time does not count, waiting for slots does, and what waits is told."""
    seen = Watched()
    seen.wait(5)
    seen.begin(pull())
    for _ in range(10):
        seen.throughput.moved(P_INC, 50_000, 0.001)
        seen.wait(0.1)
    health = seen.book.snapshot()[0]
    assert health.bytes_per_s == pytest.approx(500_000, rel=0.3)
    assert health.waiting_bytes == 640 * TOKEN_BYTES
    assert health.up
    assert health.transport == "tcp"
    waiting = seen.registry.get_sample_value("tandem:kv_waiting_bytes")
    assert waiting == 640 * TOKEN_BYTES
    seen.throughput.end(A)
    seen.wait(5)
    health = seen.book.snapshot()[0]
    assert health.bytes_per_s == pytest.approx(500_000, rel=0.3)
    assert health.waiting_bytes == 0


def test_a_link_that_came_to_rest_is_told_once_more():
    """Else it would go on as one with KV that waits, until the next hand-off."""
    seen = Watched()
    assert seen.throughput.rest() is None
    seen.begin(pull())
    seen.wait(1)
    seen.throughput.end(A)
    assert seen.throughput.rest() is not None
    seen.wait(0.1)
    assert seen.book.snapshot()[0].waiting_bytes == 0
    assert seen.throughput.rest() is None
    seen.throughput.end(A)
    assert seen.throughput.rest() is None


def test_a_wait_for_blocks_of_ones_own_says_nothing_of_the_link():
    """A full decode worker has KV announced for seconds and asks for none; its bytes are told."""
    seen = Watched()
    seen.begin(pull())
    for _ in range(10):
        seen.throughput.moved(P_INC, 50_000, 0.001)
        seen.wait(0.1)
    seen.throughput.end(A)
    paced = seen.book.snapshot()[0].bytes_per_s
    waits = pull(make_key("full"), state=DState.WAITING, start=None)
    seen.begin(waits)
    seen.wait(5)
    health = seen.book.snapshot()[0]
    assert health.bytes_per_s == paced
    assert health.waiting_bytes == 640 * TOKEN_BYTES
    seen.pulls[waits.key] = pull(waits.key)
    seen.wait(5)
    assert seen.book.snapshot()[0].bytes_per_s < paced / 2


def test_a_pace_is_forgotten_when_nothing_has_used_the_link_for_minutes():
    """Placement uses no link that was slow: it would never be measured again. The thread wakes for
    that, once."""
    seen = Watched()
    seen.begin(pull())
    for _ in range(10):
        seen.throughput.moved(P_INC, 50, 0.001)
        seen.wait(0.1)
    seen.throughput.end(A)
    seen.wait(0.1)
    assert seen.book.snapshot()[0].bytes_per_s == pytest.approx(500, rel=0.3)
    rest = seen.throughput.rest() or 0.0
    assert rest == pytest.approx(IDLE_SECONDS, abs=1)
    seen.now += rest - 1
    assert seen.throughput.look(seen.pulls) == []
    assert seen.book.snapshot()[0].bytes_per_s
    seen.now += 1
    assert seen.throughput.look(seen.pulls) == [P_INC]
    assert seen.book.snapshot()[0].bytes_per_s == 0
    assert seen.throughput.rest() is None
    seen.wait(1)
    assert seen.throughput.look(seen.pulls) == []
    seen.begin(pull())
    for _ in range(10):
        seen.throughput.moved(P_INC, 500_000, 0.001)
        seen.wait(0.1)
    assert seen.book.snapshot()[0].bytes_per_s == pytest.approx(5_000_000, rel=0.3)


@pytest.mark.parametrize(
    ("phase", "changes"),
    [
        ("reserve", {"state": DState.WAITING, "start": None}),
        ("pack", {}),
        ("slot", {"queued": (PART,)}),
        ("read", {"reading": (PART,), "queued": (PART,)}),
        ("unpack", {"unpacking": (PART,), "reached": (576,)}),
        ("commit", {"state": DState.COMMITTING, "reached": (640,)}),
    ],
)
def test_a_slow_hand_off_is_warned_of_with_what_it_waits_for(caplog, phase, changes):
    """Once each, with a metric by phase; the log does not drown."""
    caplog.set_level(logging.WARNING)
    seen = Watched()
    seen.begin(pull(**changes))
    seen.wait(0.9)
    assert not caplog.records
    seen.wait(0.2)
    assert f"it waits for {phase}" in caplog.text
    assert seen.slow(phase) == 1
    assert phase_of(seen.pulls[A]) in PHASES_OF_WAITING
    for number in range(20):
        seen.begin(pull(make_key(f"later{number}"), **changes))
    seen.wait(2)
    assert seen.slow(phase) == 21
    assert len(caplog.records) == 1
    seen.now += WARN_SECONDS
    seen.begin(pull(make_key("last"), **changes))
    seen.wait(1.2)
    assert "20 more like it" in caplog.records[1].getMessage()


def test_large_hand_offs_over_slow_links_are_not_slow(caplog):
    """A link that never did better than 100 kB/s is given 4 x 6.4 s for 640 kB."""
    caplog.set_level(logging.WARNING)
    seen = Watched()
    seen.throughput.moved(P_INC, 100_000, 1.0)
    seen.begin(pull())
    seen.wait(25)
    assert not caplog.records
    seen.wait(2)
    assert seen.slow("pack") == 1


def test_prompts_that_are_still_computed_are_not_slow():
    """Only from the end of the prompt on does anybody owe KV."""
    seen = Watched()
    seen.pulls[A] = msgspec.structs.replace(pull(), final=None, upto=64)
    seen.throughput.begin(A)
    seen.wait(30)
    assert not any(map(seen.slow, PHASES_OF_WAITING))


GIB, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("given", "block", "gpu", "slot", "ahead"),
    [
        ({}, 9 * MIB, None, 9 * MIB + 4096, 4),
        ({}, 64 << 10, None, 4 * MIB, 4),
        ({}, 9 * MIB, 140 * GIB, 128 * MIB, 6),
        ({}, 9 * MIB, 24 * GIB, 24 * MIB, 6),
        ({"kv_slot_bytes": 16 * MIB, "kv_credits": 2}, 9 * MIB, 140 * GIB, 16 * MIB, 2),
        ({"kv_slot_bytes": 16 * MIB}, 32 * MIB, 140 * GIB, 32 * MIB + 4096, 6),
    ],
)
def test_slots_follow_the_device_and_the_block_size(given, block, gpu, slot, ahead):
    """Large where parts are dear, small where copies are, and never less than a block."""
    sizes = slot_sizes(KVTransferConfig(**given), block, count=16, gpu_bytes=gpu)
    assert (sizes.slot_bytes, sizes.credits) == (slot, ahead)


@pytest.mark.parametrize(("staged", "slot"), [(True, 32 * MIB), (False, 9 * MIB + 4096)])
def test_slots_of_a_gpus_blocks_in_host_memory_hold_several(staged, slot):
    """Sockets and the GPU's copies carry them; between CPUs a part is a block."""
    sizes = slot_sizes(KVTransferConfig(), 9 * MIB, count=16, gpu_bytes=None, staged=staged)
    assert sizes.slot_bytes == slot
