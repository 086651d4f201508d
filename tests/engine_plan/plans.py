"""Short ways to look at plans, for the scheduler tests."""

from tests.engine_plan.builders import Harness, params_of

from tandem.engine.step import SchedulerOutput
from tandem.protocol.outputs import EngineCoreOutput


def next_plan(harness: Harness) -> SchedulerOutput:
    """The next step's plan, run, and its results taken in."""
    plan = harness.core.scheduler.schedule()
    assert plan is not None
    output = harness.executor.execute(plan).result()
    harness.core.scheduler.update_from_output(output)
    outputs, _ = harness.core.scheduler.outbox.take()
    harness.outputs += [
        each for batch in outputs.values() for each in batch if isinstance(each, EngineCoreOutput)
    ]
    return plan


def shape_of(plan: SchedulerOutput) -> list[tuple[int, int, int, tuple[int, ...]]]:
    """(sequence, first token, tokens, choices to draw) of each row."""
    return [
        (int(row.seq), row.num_computed, row.num_scheduled_tokens, row.sample_choices)
        for row in plan.rows
    ]


def long_running(**fields):
    """Parameters of a request that goes on until its length ends it."""
    return params_of(ignore_eos=True, **fields)
