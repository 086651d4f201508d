"""A prefill and a decode worker with other limits each: one rule says where a request ends.

And what becomes of blocks when the two disagree all the same: a peer of another build, or a bug.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine_plan.builders import params_of
from tests.engine_plan.pair import Pair, consume, merged, produce

from tandem.engine.scheduler import scheduler
from tandem.protocol.errors import FailCause, RefusalCode
from tandem.protocol.kv import FirstToken, Loaded
from tandem.protocol.outputs import FinishReason

LONG = params_of(max_tokens=30, ignore_eos=True)


def hand_over(pair: Pair, count: int, limit: int | None, **fields: object) -> None:
    """One request through both, as a router sends it; D acts on whatever P said of token 1."""
    shared = {"params": LONG, "max_model_len": limit, **fields}
    pair.prefill("a", count, **shared)
    export = pair.producer.exports[consume("a").key]
    if export.ended is None:
        pair.deliver(pair.reserve("a", count, **shared))
        return
    assert pair.d.add(consume("a", count, **shared)) is None
    assert export.first is not None
    pair.consumer.events.append(Loaded(consume("a").key, export.first, usable=False))
    pair.producer.release(consume("a").key)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(count=st.integers(38, 46), p_len=st.integers(40, 60), d_len=st.integers(40, 60))
def test_one_limit_decides_for_both(count, p_len, d_len):
    """Whatever either worker could hold, the output is D's alone: same tokens, same ending."""
    if count >= min(p_len, d_len):
        return
    pair = Pair(p_len=p_len, d_len=d_len)
    hand_over(pair, count, d_len)
    pair.d.run()
    request = consume("a", count, params=LONG, max_model_len=d_len)
    assert pair.d.failed == []
    expected, reason = pair.d.oracle(request)
    assert merged(pair, request, 0) == expected
    assert (pair.d.finish("a"), reason) == (FinishReason.LENGTH, FinishReason.LENGTH)
    pair.check_empty()


def test_each_by_its_own_limit_they_disagree(monkeypatch):
    """Without the request's limit P ends what D would go on with, and the link gets the blame."""
    monkeypatch.setattr(scheduler, "end_of", lambda source, own: own)
    pair = Pair(p_len=41, d_len=60)
    hand_over(pair, 40, 60)
    pair.d.run()
    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    pair.check_empty()


def test_a_limit_above_a_workers_own_is_cut_where_it_goes_on():
    """Who decodes holds no more than it can, whatever a router believes."""
    pair = Pair(d_len=44)
    hand_over(pair, 40, 1000)
    pair.d.run()
    assert len(merged(pair, consume("a", 40), 0)) == 4
    pair.check_empty()


def test_a_producer_refuses_what_it_cannot_hold():
    """It computes what was emitted, too: more than its blocks hold would wait for ever."""
    pair = Pair(p_blocks=3)
    fields = {"params": LONG, "max_model_len": 100}
    assert pair.p.add(produce("a", 45, emitted=((1, 2, 3),), **fields)) is RefusalCode.NEVER_FITS
    assert pair.p.add(produce("b", 45, emitted=((1, 2),), **fields)) is None
    while pair.p.core.holds(produce("b").key):
        assert pair.p.step().progressed
    pair.producer.release(produce("b").key)
    pair.check_empty()


@pytest.mark.parametrize("choices", [(0,), (0, 1)], ids=["a false end", "other choices"])
def test_blocks_that_are_still_unpacked_are_nobodys(choices):
    """P says that token 1 ended it, and it does not: D fails the request at once, and frees its
    blocks only when the last part that came has been unpacked."""
    pair = Pair(d_blocks=8)
    pair.prefill()
    request = pair.reserve(params=LONG)
    first = tuple(FirstToken(choice, 1) for choice in choices)
    pair.consumer.keep_on_abort = False
    pair.consumer.events.append(Loaded(request.key, first, usable=False, blocks_free=False))
    pair.d.step()

    assert [each.cause for each in pair.d.failed] == [FailCause.IDENTITY]
    assert pair.d.core.stats()["held_blocks"] == 4
    assert pair.d.core.stats()["free_blocks"] == 4
    pair.consumer.release(request.key)
    pair.producer.release(request.key)
    pair.check_empty()
