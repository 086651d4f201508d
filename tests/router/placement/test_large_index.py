"""A prefix index of many blocks: no step of it is so long that streams wait for it."""

from __future__ import annotations

import pytest
from tests.router.builders import inc

from tandem.protocol.ids import BlockHash
from tandem.protocol.outputs import BlockEvents
from tandem.router.placement import prefix_index
from tandem.router.placement.prefix_index import ENTRY_BYTES, PrefixIndex


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def test_no_table_of_the_index_is_so_large_that_streams_wait_while_it_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond ``SPLIT`` blocks of a worker each dict has its share of them, what is there is found,
    what is taken away is not, and the oldest go first."""
    monkeypatch.setattr(prefix_index, "SPLIT", 512)
    index = PrefixIndex(10_240 * ENTRY_BYTES)
    blocks = list(map(block, range(10_241)))
    for start in range(0, 10_240, 256):
        index.apply(inc(1), BlockEvents(stored=tuple(blocks[start : start + 256])))
    (cache,) = index._caches.values()
    assert max(map(len, cache.shards)) == 40
    index.apply(inc(1), BlockEvents(stored=(blocks[10_240],)))
    assert len(index) == 10_241 - 640
    here = [index.hits(inc(1), [each]) for each in blocks]
    assert here.count(0) == 640
    assert all(here[768:])
    index.apply(inc(1), BlockEvents(removed=tuple(blocks[5000:5100])))
    assert len(index) == 10_241 - 640 - 100
    assert index.hits(inc(1), blocks[768:]) == 5000 - 768
    assert [index.hits(inc(1), [each]) for each in blocks[4999:5101]] == [1, *[0] * 100, 1]


def test_the_blocks_of_a_worker_that_is_gone_are_not_let_go_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it counts from then on; its dicts go one by one, as others tell of theirs."""
    monkeypatch.setattr(prefix_index, "SPLIT", 512)
    monkeypatch.setattr(prefix_index, "LET_GO", 7)
    index = PrefixIndex(10_240 * ENTRY_BYTES)
    blocks = tuple(map(block, range(1024)))
    index.apply(inc(1), BlockEvents(stored=blocks))
    index.drop(inc(1))
    assert (len(index), index.hits(inc(1), blocks)) == (0, 0)
    left = []
    for each in blocks[:300]:
        index.apply(inc(2), BlockEvents(stored=(each,)))
        left.append(len(index._leaving))
    assert left == [*range(255, -1, -1), *[0] * 44]
    index.apply(inc(2), BlockEvents(cleared=True, stored=blocks[:2]))
    assert (len(index), index.hits(inc(2), blocks)) == (2, 2)


def test_who_comes_and_goes_leaves_no_more_behind_than_the_index_may_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A link that breaks again and again under a large picture; and all of it goes where nobody
    has news any more."""
    monkeypatch.setattr(prefix_index, "SPLIT", 512)
    monkeypatch.setattr(prefix_index, "LET_GO", 128)
    index = PrefixIndex(4_096 * ENTRY_BYTES)
    parts = [tuple(map(block, range(64 * part, 64 * part + 64))) for part in range(40)]
    for _ in range(50):
        for part in parts:
            index.apply(inc(1), BlockEvents(stored=part))
            assert len(index) + sum(map(len, index._leaving)) <= 4_096
            assert len(index._leaving) <= 4 * prefix_index.SHARDS
        index.drop(inc(1))
    for _ in range(40):
        index.tidy()
    assert index._leaving == []
