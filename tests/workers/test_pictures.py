"""What a router that has just come hears of a prefix cache: in parts, while it changes."""

from __future__ import annotations

import random

import pytest
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, frames, submit

from tandem.engine.cache.block_pool import BlockEventLog
from tandem.link.sockets import MAX_FRAME_BYTES
from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.messages import Frame, encode
from tandem.protocol.outputs import BlockEvents
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.worker import cache_snapshots
from tandem.worker.cache_snapshots import PART_BLOCKS, PAUSE_SECONDS, CacheSnapshots

ROUTER, OTHER = Incarnation(b"r" * 16), Incarnation(b"o" * 16)
WORKER = Incarnation(b"w" * 16)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


class Cache:
    """Hashes that come and go, and the log of it."""

    def __init__(self, count: int) -> None:
        self.held = dict.fromkeys(map(block, range(count)))
        self.log = BlockEventLog()

    def cached_blocks(self) -> BlockEvents:
        return BlockEvents(stored=tuple(self.held), cleared=True)

    def still_cached(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        return tuple(each for each in hashes if each in self.held)

    def store(self, digest: BlockHash) -> None:
        self.held[digest] = None
        self.log.stored(digest)

    def remove(self, digest: BlockHash) -> None:
        del self.held[digest]
        self.log.removed(digest)


def test_parts_are_small_and_come_one_by_one() -> None:
    """However large the cache is: streams of the router wait for one of them at most."""
    cache = Cache(3 * PART_BLOCKS + 1)
    told = CacheSnapshots(cache)
    parts = [told.begin(ROUTER, 0.0)]
    assert told.seconds(0.0) == PAUSE_SECONDS
    assert not [*told.parts(PAUSE_SECONDS / 2)]
    for turn in range(1, 9):
        parts += [part for _, part in told.parts(turn * PAUSE_SECONDS)]

    assert [each.cleared for each in parts] == [True, False, False, False]
    assert sum((each.stored for each in parts), ()) == tuple(cache.held)
    assert all(len(encode(Frame(1, blocks=each))) < MAX_FRAME_BYTES >> 9 for each in parts)
    assert told.seconds(9 * PAUSE_SECONDS) == float("inf")


def test_each_router_has_its_own_and_who_is_gone_none() -> None:
    """One that comes again hears all of it again."""
    told = CacheSnapshots(Cache(3 * PART_BLOCKS))
    told.begin(ROUTER, 0.0)
    told.begin(OTHER, 0.0)
    assert [router for router, _ in told.parts(1.0)] == [ROUTER, OTHER]
    told.forget(OTHER)
    told.begin(ROUTER, 1.0)
    assert [router for turn in (2.0, 3.0, 4.0) for router, _ in told.parts(turn)] == [ROUTER] * 2
    told.forget(ROUTER)
    assert told.seconds(4.0) == float("inf")


@pytest.mark.parametrize("seed", range(5))
def test_what_changes_meanwhile_is_known_as_it_is(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A router's index has in the end what is cached, in whatever order steps and parts are told;
    what is in no log yet will be."""
    monkeypatch.setattr(cache_snapshots, "PART_BLOCKS", 3)
    choose, cache, index = random.Random(seed), Cache(40), PrefixIndex(1 << 20)
    told = CacheSnapshots(cache)
    index.apply(WORKER, told.begin(ROUTER, 0.0))
    for turn in range(100):
        for _ in range(choose.randrange(3)):
            cache.remove(choose.choice([*cache.held]))
            cache.store(block(choose.randrange(60)))
        events = cache.log.drain() if choose.random() < 0.5 else None
        for each in (events, *(part for _, part in told.parts(turn))):
            if each is not None:
                index.apply(WORKER, each)
    index.apply(WORKER, cache.log.drain() or BlockEvents())

    assert [each for each in map(block, range(60)) if index.hits(WORKER, [each])] == sorted(
        cache.held
    )
    assert len(index) == len(cache.held)


def test_a_router_hears_all_of_an_idle_worker_in_parts(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though no step wakes its loop."""
    monkeypatch.setattr(cache_snapshots, "PART_BLOCKS", 1)
    submit(router, "a", prompt=100)
    frames(router, "a")
    newcomer = Router(worker.proc.endpoint)
    newcomer.greet()
    parts: list[BlockEvents] = []
    while sum(len(part.stored) for part in parts) < 6:
        parts.append(newcomer.hear(Frame).blocks)

    assert [part.cleared for part in parts] == [True] + [False] * 5
    assert all(len(part.stored) == 1 for part in parts)
    newcomer.socket.close()
