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
        SeqId(seq), list(range(tokens)), tokens, params_of(), 0, EOS, (list(blocks),)
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
    other = NewSequence(SeqId(1), [9] * 20, 20, params_of(), 0, EOS, ([0, 1],))
    with pytest.raises(AssertionError, match="other tokens"):
        executor.execute(SchedulerOutput(2, (row,), (other,)))

    with pytest.raises(AssertionError, match="unwritten"):
        prefilled().execute(SchedulerOutput(2, (row,), (new(1, blocks=(0, 2)),)))


def test_a_sequence_is_introduced_once():
    """A second introduction without a drop is a bookkeeping error."""
    with pytest.raises(AssertionError, match="introduced twice"):
        prefilled().execute(SchedulerOutput(2, (), (new(),)))
