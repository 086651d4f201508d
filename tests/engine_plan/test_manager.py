"""Block tables: hits, growth, sharing with copies, and who frees what in which order."""

import pytest
from tests.engine_plan.builders import request_of

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.request import Request, RequestGroup
from tandem.engine.step import SeqId
from tandem.protocol.hashing import root_hash

BLOCK = 4
_numbers = iter(range(10**6))


def sequence_of(prompt: list[int], choice: int = 0) -> Request:
    source = request_of("m", prompt)
    root = root_hash(fingerprint="f", block_size=BLOCK)
    group = RequestGroup(
        source=source,
        root=root,
        block_size=BLOCK,
        arrival=0.0,
        number=1,
        turn=0,
        deadline=None,
        max_model_len=100,
    )
    return Request(
        SeqId(next(_numbers)),
        group,
        (choice,),
        token_ids=list(prompt),
        num_prompt=len(prompt),
        order=(0, 0, 1, choice),
        max_len=100,
        block_hashes=[],
    )


def computed(manager: KVCacheManager, request: Request) -> Request:
    """Start a sequence, pretend that all its tokens were computed, and cache them."""
    hits = manager.find_cached_prefix(request, request.max_cached_tokens)
    manager.start(request, hits, len(request.token_ids))
    request.num_computed = len(request.token_ids)
    manager.cache_full(request)
    return request


def test_a_sequence_takes_whole_blocks():
    """Ten tokens take three blocks of four; growing adds one when a token does not fit."""
    manager = KVCacheManager(5, BLOCK)
    request = computed(manager, sequence_of(list(range(10))))

    assert request.block_tables[0] == [0, 1, 2]
    assert request.capacity == 12
    assert manager.grow(request, 12) == ((),)
    assert manager.grow(request, 13) == ((3,),)
    assert manager.grow(request, 21) is None
    assert manager.usage == pytest.approx(0.8)


def test_only_full_blocks_are_found_again():
    """A prefix hit ends at the last full block, and leaves at least one token to compute."""
    manager = KVCacheManager(8, BLOCK)
    first = computed(manager, sequence_of(list(range(10))))
    manager.free(first)

    same, longer, eight = (sequence_of(list(range(size))) for size in (10, 14, 8))
    assert manager.find_cached_prefix(same, same.max_cached_tokens).tables[0] == [0, 1]
    assert manager.find_cached_prefix(longer, longer.max_cached_tokens).tables[0] == [0, 1]
    assert manager.find_cached_prefix(eight, eight.max_cached_tokens).tables[0] == [0]
    assert manager.find_cached_prefix(eight, 8).tables[0] == [0, 1]


def test_tails_are_evicted_before_heads():
    """A freed sequence gives up its last block first, so that its prefix lives longest."""
    manager = KVCacheManager(3, BLOCK)
    request = computed(manager, sequence_of(list(range(12))))
    assert request.block_tables[0] == [0, 1, 2]
    manager.free(request)

    assert manager.pool.take(2) == [2, 1]
    assert manager.find_cached_prefix(sequence_of(list(range(12))), 11).tables[0] == [0]


def test_hits_are_counted_before_a_start_is_promised():
    """Free cached blocks that a start would pin cannot be given to it a second time."""
    manager = KVCacheManager(4, BLOCK)
    manager.free(computed(manager, sequence_of(list(range(8)))))
    request = sequence_of(list(range(20)))
    hits = manager.find_cached_prefix(request, request.max_cached_tokens)

    assert hits.tables[0] == [0, 1]
    assert manager.can_start(hits, 16)
    assert not manager.can_start(hits, 17)
    assert not manager.can_start(hits, 16, extra=1)


def test_the_watermark_keeps_blocks_back():
    """A start that must keep spare blocks leaves them free."""
    manager = KVCacheManager(10, BLOCK, watermark=0.25)

    assert manager.can_start(manager.groups.nothing, 40)
    assert manager.can_start(manager.groups.nothing, 32, keep_spare=True)
    assert not manager.can_start(manager.groups.nothing, 33, keep_spare=True)


def test_a_fork_shares_full_blocks_and_copies_the_last():
    """The child holds the parent's full blocks and a copy of the partial one."""
    manager = KVCacheManager(8, BLOCK)
    parent = computed(manager, sequence_of(list(range(10))))
    child = sequence_of(list(range(10)), choice=1)

    assert manager.fork(parent, child)
    assert child.block_tables[0] == [0, 1, 3]
    assert child.num_cached_blocks == 2
    manager.check([parent.block_tables[0], child.block_tables[0]])
    assert manager.take_copies() == ((2, 3),)
    assert manager.take_copies() == ()
    manager.check([parent.block_tables[0], child.block_tables[0]])


def test_a_fork_at_a_block_border_needs_no_copy():
    """Without a partial block, everything is shared, even when no block is free."""
    manager = KVCacheManager(2, BLOCK)
    parent = computed(manager, sequence_of(list(range(8))))
    child = sequence_of(list(range(8)), choice=1)

    assert manager.fork(parent, child)
    assert child.block_tables[0] == parent.block_tables[0]
    assert manager.take_copies() == ()


def test_a_fork_without_room_does_nothing():
    """Where no block is free for the copy, the child stays without blocks."""
    manager = KVCacheManager(3, BLOCK)
    parent = computed(manager, sequence_of(list(range(10))))
    child = sequence_of(list(range(10)), choice=1)

    assert not manager.fork(parent, child)
    assert child.num_blocks == 0
    manager.check([parent.block_tables[0]])


def test_a_source_lives_until_its_copy_is_planned():
    """A parent that ends before the copy is made does not give the source away."""
    manager = KVCacheManager(8, BLOCK)
    parent = computed(manager, sequence_of(list(range(10))))
    child = sequence_of(list(range(10)), choice=1)
    manager.fork(parent, child)

    manager.free(parent)
    assert not manager.pool.is_free(2)
    manager.check([child.block_tables[0]])
    manager.take_copies()
    assert manager.pool.is_free(2)


def test_a_copy_that_nobody_wants_is_dropped():
    """A child that ends before its copy is made takes the copy along."""
    manager = KVCacheManager(8, BLOCK)
    parent = computed(manager, sequence_of(list(range(10))))
    child = sequence_of(list(range(10)), choice=1)
    manager.fork(parent, child)

    manager.free(child)
    assert manager.take_copies() == ()
    manager.check([parent.block_tables[0]])


def test_blocks_handed_out_come_back_once():
    """What a peer keeps is not free, and is freed like any other when it comes back."""
    manager = KVCacheManager(4, BLOCK)
    request = computed(manager, sequence_of(list(range(10))))

    blocks = manager.pin_for_transfer(request)
    assert request.num_blocks == 0
    manager.check([blocks])
    assert manager.num_free == 1
    manager.unpin(blocks)
    assert manager.num_free == 4


def test_truncation_gives_back_the_rest():
    """Blocks beyond a length are freed; what stays keeps its hashes."""
    manager = KVCacheManager(4, BLOCK)
    request = computed(manager, sequence_of(list(range(14))))

    manager.truncate(request, 4)

    assert request.block_tables[0] == [0]
    assert (request.capacity, request.num_cached_blocks) == (4, 1)
    manager.check([request.block_tables[0]])


def test_without_caching_nothing_is_found():
    """With prefix caching off, blocks get no hash and freed ones are empty."""
    manager = KVCacheManager(4, BLOCK, enable_caching=False)
    manager.free(computed(manager, sequence_of(list(range(10)))))

    assert manager.find_cached_prefix(sequence_of(list(range(10))), 9).tables[0] == []
    assert manager.log.drain() is None
    assert manager.reset_prefix_cache() == 0
