"""Blocks: exact ids, eviction order, reference counts, and a machine that tries everything."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.engine.cache.block_pool import BlockEventLog, BlockPool, IntegrityError
from tandem.protocol.ids import BlockHash


def digest(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, BlockEventLog())


def test_blocks_come_in_ascending_order():
    """A new pool gives block 0 first; none is kept back."""
    pool = pool_of(4)

    assert pool.take(3) == [0, 1, 2]
    assert pool.num_free == 1
    assert pool.take(1) == [3]


def test_blocks_without_a_hash_are_reused_last_freed_first():
    """A freed block that holds nothing worth keeping is the next one to be given out."""
    pool = pool_of(4)
    taken = pool.take(4)

    pool.release(reversed(taken))

    assert pool.take(4) == [0, 1, 2, 3]


def test_cached_blocks_are_evicted_in_the_order_of_their_release():
    """Blocks without a hash go first, then cached ones, least recently released first."""
    pool = pool_of(5)
    blocks = pool.take(4)
    for block in (1, 2, 3):
        pool.cache(block, digest(block))

    pool.release([2, 0, 3, 1])

    assert pool.take(2) == [0, 4]
    assert pool.take(3) == [2, 3, 1]
    assert [pool.find(digest(block)) for block in blocks] == [None] * 4


def test_a_hit_is_saved_from_eviction():
    """Holding a cached block takes it out of the line; letting go puts it at the end."""
    pool = pool_of(3)
    pool.take(3)
    for block in range(3):
        pool.cache(block, digest(block))
    pool.release([0, 1, 2])

    pool.hold([0])
    pool.release([0])

    assert pool.take(3) == [1, 2, 0]


def test_shared_blocks_outlive_their_first_holder():
    """A block is free only when all who hold it have let go."""
    pool = pool_of(2)
    (block,) = pool.take(1)
    pool.hold([block])

    pool.release([block])
    assert pool.is_free(block) is False
    pool.release([block])
    assert pool.is_free(block) is True


def test_equal_content_is_cached_once():
    """The first block of some content is the one that is found; the second has no hash."""
    log = BlockEventLog()
    pool = BlockPool(2, log)
    pool.take(2)

    pool.cache(0, digest(9))
    pool.cache(1, digest(9))
    pool.cache(0, digest(8))

    assert pool.find(digest(9)) == 0
    assert pool.find(digest(8)) is None
    events = log.drain()
    assert events is not None
    assert events.stored == (digest(9),)


def test_freeing_twice_is_found_at_once():
    """A block that nobody holds cannot be let go of."""
    pool = pool_of(1)
    pool.release(pool.take(1))

    with pytest.raises(IntegrityError, match="freed twice"):
        pool.release([0])


def test_forgetting_spares_what_is_held():
    """A reset drops cached blocks that nobody holds and says so; held ones stay findable."""
    log = BlockEventLog()
    pool = BlockPool(3, log)
    pool.take(3)
    for block in range(3):
        pool.cache(block, digest(block))
    pool.release([1, 2])
    log.drain()

    assert pool.forget_free() == 2
    events = log.drain()
    assert events is not None
    assert set(events.removed) == {digest(1), digest(2)}
    assert not events.cleared
    pool.release([0])
    assert pool.forget_free() == 1
    events = log.drain()
    assert events is not None
    assert (events.cleared, events.removed) == (True, ())
    assert pool.take(3) == [0, 2, 1]


@pytest.mark.parametrize(
    ("holders", "match"),
    [({0: 1}, "holders"), ({}, "references"), ({0: 2, 1: 1}, "references")],
)
def test_check_finds_wrong_counts(holders, match):
    """Holders that differ from the counts are a leak or a block shared by accident."""
    pool = pool_of(3)
    pool.take(2)

    pool.check({0: 1, 1: 1})
    with pytest.raises(IntegrityError, match=match):
        pool.check(holders)


def test_check_finds_broken_lists():
    """A pool whose parts disagree with each other says which one is wrong."""
    twice, lost, hashless, unfindable, cross, misfiled = (pool_of(2) for _ in range(6))
    twice._empty.append(0)
    lost.take(1)
    lost._references[0] = 0
    hashless._hash_of[0] = digest(1)
    unfindable.take(1)
    unfindable._hash_of[0] = digest(1)
    cross.take(1)
    cross._block_of[digest(1)] = 0
    misfiled.take(1)
    misfiled._empty.append(0)
    found = [
        (twice, {}, "twice"),
        (lost, {}, "wrong list"),
        (hashless, {}, "wrong free list"),
        (unfindable, {0: 1}, "cannot be found"),
        (cross, {0: 1}, "does not have"),
        (misfiled, {0: 1}, "wrong list"),
    ]

    for pool, holders, match in found:
        with pytest.raises(IntegrityError, match=match):
            pool.check(holders)


def test_events_are_net():
    """A message never both stores and removes a hash; clearing wins over what came before."""
    log = BlockEventLog()
    assert log.drain() is None

    log.stored(digest(1))
    log.removed(digest(1))
    log.removed(digest(2))
    log.stored(digest(2))
    events = log.drain()
    assert events is not None
    assert (events.stored, events.removed, events.cleared) == ((digest(2),), (digest(1),), False)

    log.stored(digest(3))
    log.cleared()
    log.stored(digest(4))
    events = log.drain()
    assert events is not None
    assert (events.stored, events.removed, events.cleared) == ((digest(4),), (), True)


class PoolMachine(RuleBasedStateMachine):
    """Any order of takes, shares, releases, caching and resets, against a plain model."""

    SIZE = 8

    def __init__(self) -> None:
        super().__init__()
        self.log = BlockEventLog()
        self.pool = BlockPool(self.SIZE, self.log)
        self.tables: list[list[int]] = []
        self.known: set[bytes] = set()
        """What a router believes to be cached."""
        self.number = 0

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take(self, data):
        count = data.draw(st.integers(1, self.pool.num_free))
        held = {block for table in self.tables for block in table}
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        assert not held & set(taken)
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(reversed(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), fresh=st.booleans())
    def cache(self, data, fresh):
        """A held block becomes findable, under a new hash or one that may exist."""
        table = data.draw(st.sampled_from(self.tables))
        block = data.draw(st.sampled_from(table))
        self.number += fresh
        self.pool.cache(block, digest(self.number))

    @rule(number=st.integers(0, 30))
    def hit(self, number):
        """A cached block gets one more holder."""
        block = self.pool.find(digest(number))
        if block is not None:
            self.pool.hold([block])
            self.tables.append([block])

    @rule()
    def forget(self):
        self.pool.forget_free()

    @invariant()
    def counts_agree(self):
        """Nothing leaks, and a router that hears the events knows what is cached."""
        self.pool.check(Counter(block for table in self.tables for block in table))
        events = self.log.drain()
        if events is not None:
            if events.cleared:
                self.known.clear()
            assert not set(events.stored) & set(events.removed)
            self.known -= set(events.removed)
            self.known |= set(events.stored)
        assert len(self.known) == self.pool.num_cached
        assert all(self.pool.find(BlockHash(each)) is not None for each in self.known)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
