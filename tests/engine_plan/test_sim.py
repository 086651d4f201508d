"""The executor without a model finds what is wrong with a plan."""

import pytest
from tests.engine_plan.builders import EOS, config_of, params_of
from tests.engine_plan.sim import SimExecutor

from tandem.engine.step import NewSequence, SchedulerOutput, SeqId, StepRow


def started() -> SimExecutor:
    executor = SimExecutor(8, verify=True)
    executor.start(config_of())
    return executor


def new(seq: int = 0, tokens: int = 20, blocks: tuple[int, ...] = (0, 1)) -> NewSequence:
    return NewSequence(
        SeqId(seq), list(range(tokens)), tokens, params_of(), 0, EOS, list(blocks)
    )  # fmt: skip


def prefilled() -> SimExecutor:
    """An executor that ran the prompt of sequence 0."""
    executor = started()
    executor.execute(SchedulerOutput(1, (StepRow(SeqId(0), 0, 20, (), (0,)),), (new(),)))
    return executor


def test_wrong_blocks_are_found():
    """A row that reads blocks of other tokens, or blocks never written, does not pass."""
    executor = prefilled()
    row = StepRow(SeqId(1), 18, 2, (), (0,))
    other = NewSequence(SeqId(1), [9] * 20, 20, params_of(), 0, EOS, [0, 1])
    with pytest.raises(AssertionError, match="other tokens"):
        executor.execute(SchedulerOutput(2, (row,), (other,)))

    with pytest.raises(AssertionError, match="unwritten"):
        prefilled().execute(SchedulerOutput(2, (row,), (new(1, blocks=(0, 2)),)))


def test_a_sequence_is_introduced_once():
    """A second introduction without a drop is a bookkeeping error."""
    with pytest.raises(AssertionError, match="introduced twice"):
        prefilled().execute(SchedulerOutput(2, (), (new(),)))


def test_draws_come_at_the_end():
    """Sampling from the middle of a prompt is refused."""
    row = StepRow(SeqId(0), 0, 10, (), (0,))
    with pytest.raises(AssertionError, match="mid-prompt"):
        started().execute(SchedulerOutput(1, (row,), (new(),)))


def test_masked_ends_are_not_drawn():
    """Before min_tokens neither end-of-sequence nor stop ids come."""
    model = started().model
    params = params_of(min_tokens=12, max_tokens=12, stop_token_ids=tuple(range(1, 49)))

    tokens, finish = model.generate(range(5), params, eos=EOS, max_model_len=100)

    assert set(tokens[:11]) <= {0, 49}
    assert len(tokens) == 12
    assert finish.reason in {"stop", "length"}


def test_seeds_and_choices_matter_only_when_drawing():
    """Greedy output is the same for every seed; drawn output differs by seed and choice."""
    model = started().model

    def out(temperature: float, seed: int, choice: int) -> list[int]:
        params = params_of(temperature=temperature, seed=seed, ignore_eos=True, max_tokens=20)
        return model.generate(range(5), params, choice=choice, max_model_len=100)[0]

    assert out(0.0, 1, 0) == out(0.0, 2, 1)
    assert len({tuple(out(1.0, seed, choice)) for seed in (1, 2) for choice in (0, 1)}) == 4
