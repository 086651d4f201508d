"""Jobs that fetch or read models: not for who sleeps, and not all at once."""

from __future__ import annotations

from functools import partial

import pytest
from tests.operator.harness import Harness
from tests.operator.node import Node, Pod, waiting

from tandem.operator.decide.modelcheck import may_have_job
from tandem.operator.decide.observe import JobView
from tandem.protocol import names

MANY = 6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def held(pod: Pod) -> Pod | None:
    """A model Job's pod that does not end."""
    component = pod["metadata"]["labels"].get(names.LABEL_COMPONENT)
    return waiting("ContainerCreating", "") if component == "model" else None


def is_asleep(harness: Harness, name: str) -> bool:
    """Whether the model waits for the service to be started."""
    return harness.condition("ModelReady", name)[1] == "Suspended"


def test_suspended_services_start_no_job(harness: Harness):
    """However many there are; each looks at its model when it may start."""
    for number in range(MANY):
        harness.create(f"demo{number}", suspend=True)
    for number in range(MANY):
        name = f"demo{number}"
        harness.wait(partial(is_asleep, harness, name))
    assert harness.names("Job") == set()
    harness.change({"spec": {"suspend": False}}, "demo0")
    harness.ready("demo0")
    assert len(harness.names("Job")) == 1
    harness.change({"spec": {"suspend": True}}, "demo0")
    harness.wait(lambda: harness.condition("Ready", "demo0")[1] == "Suspended")
    assert len(harness.names("Job")) == 1, "what was read is not read again"


def test_a_job_that_runs_goes_when_its_service_sleeps(harness: Harness, node: Node):
    """Suspended means no pods, that of the Job included."""
    node.rules.append(held)
    harness.create()
    harness.wait(lambda: len(harness.names("Job")) == 1)
    harness.change({"spec": {"suspend": True}})
    harness.wait(lambda: harness.names("Job") == set())


RUNNING = JobView(name="j", succeeded=False, failed=False, report=None, problem=None)
ENDED = JobView(name="j", succeeded=True, failed=False, report=None, problem=None)
READ = JobView(name="j", succeeded=False, failed=False, report='{"ok":true}', problem=None)
CRASHED = JobView(name="j", succeeded=False, failed=False, report="Killed", problem=None)
REFUSED = JobView(name="j", succeeded=False, failed=False, report='{"ok":false}', problem=None)


@pytest.mark.parametrize(
    ("job", "suspended", "others", "waits"),
    [
        (None, False, 0, None),
        (None, False, 2, "Queued"),
        (RUNNING, False, 2, None),
        (None, True, 0, "Suspended"),
        (RUNNING, True, 1, "Suspended"),
        (ENDED, True, 0, None),
        (READ, True, 0, None),
        (CRASHED, True, 0, "Suspended"),
        (REFUSED, True, 0, "Suspended"),
    ],
)
def test_who_may_have_a_job(job: JobView | None, suspended: bool, others: int, waits: str | None):
    """The rule as a table: two may run."""
    assert may_have_job(job, suspended=suspended, others=lambda: others, most=2) == waits
