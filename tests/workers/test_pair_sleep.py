"""A pair of engines that slept hands over as before; memory that is mapped stays awake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kvtransfer.agent.agents import Running
from tests.workers.pair import Half, Pair

from tandem.protocol.commands import Command, CommandName, Reply


def call(half: Half, name: CommandName, **args: Any) -> Reply:
    return half.core.call(Command(id=1, name=name, args=args))


@pytest.mark.full
@pytest.mark.parametrize("connector", ["tcp", "memory_blocks"])
@pytest.mark.parametrize("level", [1, 2])
def test_a_pair_hands_over_after_its_sleep(connector: str, level: int) -> None:
    """Both ends, in whichever order they wake up; the links stand all the time."""
    pair = Pair(connector)
    try:
        pair.ask("a")
        pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
        for half in (pair.prefill, pair.decode):
            assert call(half, CommandName.SLEEP, level=level).values["asleep"] == 1
            assert half.core.stats()["cached_blocks"] == 0
        for half in (pair.decode, pair.prefill):
            assert call(half, CommandName.WAKE_UP).ok
        moved = pair.producer.progress()
        pair.ask("b")
        pair.until(lambda: pair.decode.finished("b") and pair.prefill.free and pair.decode.free)
        assert pair.decode.tokens("b") == pair.decode.tokens("a")
        assert pair.producer.progress() > moved, "it was handed over, not computed again"
    finally:
        pair.close()


def test_a_prompt_under_way_keeps_both_awake_until_it_is_through() -> None:
    """Mode wait, from the first step on: tokens are those of a pair that never sleeps."""
    pair = Pair("tcp")
    try:
        pair.ask("a")
        halves = (pair.prefill, pair.decode)
        for half in halves:
            assert call(half, CommandName.SLEEP, mode="wait").values["asleep"] == 0
        pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
        for half in halves:
            assert call(half, CommandName.SLEEP, mode="wait").values["asleep"] == 1
            assert call(half, CommandName.WAKE_UP).ok
        assert [pair.decode.tokens("a")] == pair.alone()
    finally:
        pair.close()


def test_memory_that_peers_map_stays_awake(tmp_path: Path) -> None:
    """A prefill worker says by what; the decode worker, whose memory nobody maps, may sleep."""
    pair = Pair("shm", kv_node_folder=str(tmp_path))
    try:
        pair.ask("a")
        pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
        said = pair.producer.keeps_awake()
        assert said is not None
        assert "mapped, by shm and shm_agent: sleep needs tcp or nixl" in said
        pair.prefill.core.sleep.keeps_awake = pair.producer.keeps_awake  # as a worker's shell does
        reply = call(pair.prefill, CommandName.SLEEP)
        assert (reply.ok, reply.message) == (False, said)
        assert pair.consumer.keeps_awake() is None
        assert call(pair.decode, CommandName.SLEEP).values["asleep"] == 1
        assert call(pair.decode, CommandName.WAKE_UP).ok
        pair.ask("b")
        pair.until(lambda: pair.decode.finished("b") and pair.prefill.free and pair.decode.free)
        assert pair.decode.tokens("b") == pair.decode.tokens("a")
    finally:
        pair.close()


def shared_bytes() -> int:
    """Of shared memory that this process has mapped and touched."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssShmem:")[2].split()[0]) * 1024


def test_a_sleeping_decode_worker_gives_its_landing_slots_back(tmp_path: Path) -> None:
    """The next read has them again, and so has a link's probe for a moment."""
    agent = Running(tmp_path)
    sizes: dict[str, Any] = {
        "kv_slot_bytes": 8 << 20,
        "kv_slots": 4,
        "kv_slots_per_peer": 4,
    }
    pair = Pair("shm", kv_node_folder=str(tmp_path), kv_node_copy="agent", **sizes)
    try:
        pair.decode.core.sleep.beside = pair.consumer
        (health,) = pair.consumer.peer_health()
        assert health.transport == "shm_agent"
        pair.ask("a")
        pair.until(lambda: pair.decode.finished("a") and pair.prefill.free and pair.decode.free)
        mover, ring = pair.consumer._mover, 32 << 20
        assert mover.resting_bytes == ring
        before = shared_bytes()
        reply = call(pair.decode, CommandName.SLEEP)
        assert reply.values["freed_bytes"] >= ring
        pair.until(lambda: not mover.resting_bytes)
        pair.until(lambda: before - shared_bytes() >= ring)

        pair.consumer.set_peers({})
        pair.until(lambda: not pair.consumer.peer_up(pair.p_id))
        pair.consumer.set_peers({pair.producer.control: pair.p_id})
        pair.until(lambda: pair.consumer.peer_up(pair.p_id))
        pair.until(lambda: not mover.resting_bytes)

        assert call(pair.decode, CommandName.WAKE_UP).ok
        pair.ask("b")
        pair.until(lambda: pair.decode.finished("b") and pair.prefill.free and pair.decode.free)
        assert mover.resting_bytes == ring, "it stays while the worker is awake"
        assert pair.decode.tokens("b") == pair.decode.tokens("a")
    finally:
        pair.close()
        agent.stop()
