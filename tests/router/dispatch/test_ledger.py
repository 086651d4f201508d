"""The log of emitted tokens: first write wins, no gap, no contradiction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.outputs import EngineCoreOutput, FinishReason, TokenLogprobs
from tandem.router.dispatch.job import Contradiction, Gap, Ledger


def output(
    position: int, *tokens: int, choice: int = 0, finish: FinishReason | None = None
) -> EngineCoreOutput:
    return EngineCoreOutput("r", 0, choice, position, tokens, finish)


def test_new_tokens_pass_as_they_are() -> None:
    ledger = Ledger(1)
    first = output(0, 5)

    assert ledger.write(first) is first
    assert ledger.emitted == ((5,),)
    assert not ledger.done


def test_repeats_are_dropped_and_overlaps_cut() -> None:
    """Only what is new goes on, with its logprobs."""
    ledger = Ledger(1)
    ledger.write(output(0, 5, 6))
    logprobs = tuple(TokenLogprobs(token, -1.0, 1) for token in (5, 6, 7))

    assert ledger.write(output(0, 5)) is None
    cut = ledger.write(EngineCoreOutput("r", 0, 0, 0, (5, 6, 7), logprobs=logprobs))

    assert cut is not None
    assert (cut.position, cut.token_ids, cut.logprobs) == (2, (7,), logprobs[2:])
    assert ledger.num_repeated == 3


@pytest.mark.parametrize(
    "bad", [output(0, 9), output(1, 9), output(0, 5, 9), output(0, 5, 6, 8, 1)]
)
def test_another_token_contradicts(bad: EngineCoreOutput) -> None:
    """A position that is written must be said again alike; nothing is written then."""
    ledger = Ledger(1)
    ledger.write(output(0, 5, 6, 7))

    with pytest.raises(Contradiction):
        ledger.write(bad)
    assert ledger.emitted == ((5, 6, 7),)


@pytest.mark.parametrize("bad", [output(2, 9), output(-1, 5), output(0, 5, choice=1)])
def test_gaps(bad: EngineCoreOutput) -> None:
    """A position beyond the next, or a choice that was not asked for."""
    ledger = Ledger(1)
    ledger.write(output(0, 5))

    with pytest.raises(Gap):
        ledger.write(bad)


def test_finish() -> None:
    """A choice ends once; repeats after it are dropped, new tokens are the worker's fault."""
    ledger = Ledger(2)
    ledger.write(output(0, 5, finish=FinishReason.STOP))

    assert ledger.write(output(0, 5)) is None
    assert ledger.finished_choices == (0,)
    assert not ledger.done
    with pytest.raises(Gap):
        ledger.write(output(1, 6))
    ledger.write(output(0, 5, choice=1, finish=FinishReason.LENGTH))
    assert ledger.done


def test_finish_that_comes_later() -> None:
    """The second saying of the last token may bring the end."""
    ledger = Ledger(1)
    ledger.write(output(0, 5))
    late = ledger.write(output(0, 5, finish=FinishReason.STOP))

    assert late is not None
    assert (late.token_ids, late.finish) == ((), FinishReason.STOP)
    assert ledger.done


def test_prompt_logprobs_pass_once() -> None:
    ledger = Ledger(1)
    ledger.write(output(0, 5))
    said = EngineCoreOutput("r", 0, 0, 0, (5,), prompt_logprobs=(None,))

    late = ledger.write(said)

    assert late is not None
    assert late.prompt_logprobs == (None,)
    assert ledger.write(said) is None


def test_starts_from_what_was_emitted() -> None:
    """A caller that resumes gives the tokens and the choices that ended."""
    ledger = Ledger(2, emitted=((5, 6), (7,)), finished=(1,))

    assert ledger.emitted == ((5, 6), (7,))
    assert ledger.finished_choices == (1,)
    assert ledger.num_tokens == 3
    assert ledger.length(0) == 2
    ledger.write(output(2, 8, finish=FinishReason.STOP))
    assert ledger.done
    assert Ledger(2).emitted == ()


@given(
    truth=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    legs=st.lists(st.lists(st.integers(1, 4), min_size=1), min_size=1, max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_any_interleaving_gives_the_truth(truth, legs, order) -> None:
    """Legs that tell the same story in any order and cut: the client reads it once, in order."""
    streams = []
    for sizes in legs:
        frames: list[EngineCoreOutput] = []
        at, sizes = 0, list(sizes)
        while at < len(truth):
            size = sizes[len(frames) % len(sizes)]
            chunk = truth[at : at + size]
            end = FinishReason.LENGTH if at + size >= len(truth) else None
            frames.append(output(at, *chunk, finish=end))
            at += size
        streams.append(frames)
    ledger = Ledger(1)
    read: list[int] = []
    ends = 0
    while any(streams):
        frames = order.choice([each for each in streams if each])
        shown = ledger.write(frames.pop(0))
        if shown is not None:
            assert shown.position == len(read)
            read += shown.token_ids
            ends += shown.finish is not None

    assert read == truth
    assert ends == 1
    assert ledger.done


@given(
    truth=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    wrong=st.integers(0, 11),
)
def test_a_lie_is_never_emitted_after_the_truth(truth, wrong) -> None:
    """A second leg that differs anywhere fails before a token of it is shown."""
    wrong %= len(truth)
    ledger = Ledger(1)
    ledger.write(output(0, *truth))
    lie = [*truth]
    lie[wrong] += 10

    with pytest.raises(Contradiction):
        ledger.write(output(0, *lie, 5))
    assert ledger.emitted == (tuple(truth),)
