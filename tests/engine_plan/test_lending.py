"""What is lent of the prefix cache: written, held, accounted for, and given back once."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of

from tandem.engine.cache.block_pool import IntegrityError
from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.engine.scheduler.scheduler import Flow
from tandem.protocol.ids import BlockHash, RequestKey

KEY = RequestKey(b"r" * 16, "a", 0).for_pull
SIZE = 16


class Landing:
    """A fence that is done when the test says so."""

    def __init__(self) -> None:
        self.landed = False

    def done(self) -> bool:
        return self.landed


def cached(harness: Harness, count: int = 48) -> tuple[CachedPrefixes, list[BlockHash]]:
    """An engine that has computed a prompt: its cache, and the hashes of the prompt's blocks."""
    request = request_of("before", count, params=params_of(max_tokens=1))
    harness.add(request)
    (made,) = harness.core.scheduler.request_table.by_seq.values()
    hashes = list(made.hashes_upto(count // SIZE))
    harness.run()
    return CachedPrefixes(harness.core.scheduler), hashes


def test_a_loan_is_of_the_longest_run_and_holds_it() -> None:
    """Blocks behind a gap are not lent; lent ones are not free, and nobody evicts them."""
    harness = Harness(num_blocks=8)
    cache, hashes = cached(harness)
    loan = cache.lend(KEY, [*hashes[:2], BlockHash(b"?" * 16), hashes[2]])
    assert loan is not None
    assert len(loan.tables[0]) == 2
    scheduler = harness.core.scheduler
    assert scheduler.held_keys() == [KEY]
    assert scheduler.manager.num_free == 6
    assert loan.fence.done()
    harness.add(request_of("other", 16 * 6 - 1, params=params_of(max_tokens=1)))
    while scheduler.has_requests:
        assert harness.step().progressed
    assert [scheduler.manager.pool.find(each) for each in hashes[:2]] == list(loan.tables[0])
    harness.core.check_integrity()

    assert scheduler.request_table.released(KEY)
    assert scheduler.manager.num_free == 8
    harness.core.check_integrity()


def test_nothing_is_held_where_nothing_is_lent() -> None:
    """No hit, no hashes, a key that is in use, and a cache that is switched off."""
    harness = Harness(num_blocks=8)
    cache, hashes = cached(harness)
    assert cache.lend(KEY, [BlockHash(b"?" * 16)]) is None
    assert cache.lend(KEY, []) is None
    assert cache.lend(KEY, hashes) is not None
    assert cache.lend(KEY, hashes) is None, "it would be held twice"
    assert harness.core.scheduler.request_table.released(KEY)
    assert harness.core.manager.num_free == 8

    off = Harness(num_blocks=8, enable_prefix_caching=False)
    cache, hashes = cached(off)
    assert cache.lend(KEY, hashes) is None


def test_a_leaked_loan_is_found() -> None:
    """Blocks that are held by nobody who is known are an error, as everywhere."""
    harness = Harness(num_blocks=8)
    cache, hashes = cached(harness)
    assert cache.lend(KEY, hashes) is not None
    harness.core.scheduler.request_table.held.pop(KEY)
    with pytest.raises(IntegrityError):
        harness.core.check_integrity()


def test_a_loan_waits_for_the_steps_that_were_planned() -> None:
    """Blocks are cached when their step is planned; later steps do not matter, and fences count."""
    flow = Flow()
    assert flow.behind_planned().done()
    flow.planned = 2
    loan = flow.behind_planned()
    first, second = Landing(), Landing()
    flow.came_through(1, first)
    first.landed = True
    assert not loan.done(), "step 2 is not through"
    flow.planned = 3
    flow.came_through(2, second)
    assert not loan.done(), "its writes have not landed"
    second.landed = True
    assert loan.done()
