"""What a step says to a router, cut into frames that the link between them takes."""

from __future__ import annotations

from itertools import chain

import pytest
from tests.engine_plan.builders import params_of
from tests.workers.hand_router import Router
from tests.workers.proc_worker import Worker, submit

from tandem.link.sockets import MAX_FRAME_BYTES
from tandem.protocol.errors import FailCause
from tandem.protocol.ids import BlockHash
from tandem.protocol.messages import Frame, encode
from tandem.protocol.outputs import (
    BlockEvents,
    EngineCoreOutput,
    EngineOutput,
    Failed,
    PooledOutput,
    TokenLogprobs,
)
from tandem.protocol.pooling import MAX_TOKEN_VALUES
from tandem.protocol.timeline import LegTimes
from tandem.worker import engine_proc as step_frames_module
from tandem.worker.engine_proc import block_frames, step_frames


def test_answers_of_one_step_are_frames_that_the_link_takes() -> None:
    """Vectors of all tokens and log-probabilities of prompts that together are beyond its bound
    go one after the other; a failure comes behind them, times before any last word."""
    scored = TokenLogprobs(151_000, -1.5, 70_000, (100_000,) * 20, (-3.25,) * 20)
    outputs: list[EngineOutput] = [
        PooledOutput(name, 0, bytes(4 * MAX_TOKEN_VALUES), 1024, 0) for name in "abcde"
    ]
    for name in "fg":
        told = (None, *(scored,) * 150_000)
        outputs.append(EngineCoreOutput(name, 0, 0, 0, (5,), prompt_logprobs=told))
    outputs += [EngineCoreOutput(name, 0, 0, 0, (5,)) for name in "hi"]
    failed = (Failed("j", 0, FailCause.INTERNAL, "failed"),)
    times = (LegTimes("a", 0, 1.0),)

    made = list(step_frames(7, tuple(outputs), failed, times))

    assert len(made) == 8
    assert [each for frame in made for each in frame.outputs] == outputs
    assert [frame.failed for frame in made] == [()] * 7 + [failed]
    assert [frame.times for frame in made] == [times] + [()] * 7
    assert {frame.step for frame in made} == {7}
    assert all(len(encode(frame)) < MAX_FRAME_BYTES for frame in made)
    assert list(step_frames(8, (), failed, ())) == [Frame(step=8, failed=failed)]


def test_a_cache_that_goes_at_once_is_told_in_frames_that_the_link_takes() -> None:
    """Four million blocks are more than its bound; what was cleared was so before all of them. Each
    frame is small, as a router's streams wait while it reads one."""
    stored = (BlockHash(b"s" * 16),) * 600_000
    removed = (BlockHash(b"r" * 16),) * 4_000_000
    events = BlockEvents(stored, removed, cleared=True)
    assert len(encode(Frame(step=7, blocks=events))) > MAX_FRAME_BYTES
    parts = [frame.blocks for frame in block_frames(7, events)]

    assert tuple(chain.from_iterable(part.stored for part in parts if part)) == stored
    assert tuple(chain.from_iterable(part.removed for part in parts if part)) == removed
    assert [part.cleared for part in parts if part] == [True] + [False] * 244
    assert all(len(encode(Frame(step=7, blocks=part))) < 700_000 for part in parts)
    assert [*block_frames(8, None)] == []
    only = BlockEvents(cleared=True)
    assert [*block_frames(8, only)] == [Frame(step=8, blocks=only)]


def test_a_step_may_be_told_in_several_frames(
    worker: Worker, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router hears all of them, with the same step."""
    monkeypatch.setattr(step_frames_module, "FRAME_BYTES", 1)
    submit(router, "a", params=params_of(n=2, max_tokens=3, temperature=1.0, ignore_eos=True))
    heard: list[tuple[int, int]] = []
    while len(heard) < 6:
        frame = router.hear(Frame)
        assert len(frame.outputs) < 2
        heard += [(frame.step, each.choice) for each in frame.outputs]

    assert [choice for _, choice in heard] == [0, 1] * 3
    assert len({step for step, _ in heard}) == 3
