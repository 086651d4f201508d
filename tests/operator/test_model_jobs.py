"""Jobs that fetch or read models: not for who sleeps, and not all at once."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from msgspec import structs
from tests.operator.harness import Harness
from tests.operator.node import Node, Pod, waiting

from tandem.operator.decide.modelcheck import may_have_job
from tandem.operator.decide.observe import JobView
from tandem.protocol import names

MANY = 6
pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(120)]


def held(pod: Pod) -> Pod | None:
    """A model Job's pod that does not end."""
    component = pod["metadata"]["labels"].get(names.LABEL_COMPONENT)
    return waiting("ContainerCreating", "") if component == "model" else None


def is_asleep(harness: Harness, name: str) -> bool:
    """Whether the model waits for the service to be started."""
    return harness.condition("ModelReady", name)[1] == "Suspended"


@pytest.mark.nightly
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


def pulls(pod: Pod) -> Pod | None:
    """A model Job's pod whose image wants a key that it has not."""
    component = pod["metadata"]["labels"].get(names.LABEL_COMPONENT)
    if component != "model" or pod["spec"].get("imagePullSecrets"):
        return None
    return waiting("ImagePullBackOff", "no basic auth credentials")


def test_a_job_that_cannot_begin_is_made_anew(harness: Harness, node: Node):
    """When the podTemplate says what it lacked; nobody has to delete it."""
    node.rules.append(pulls)
    harness.create()
    harness.wait(lambda: "basic auth" in harness.condition("ModelReady")[2])
    spec = {"imagePullSecrets": [{"name": "registry"}]}
    harness.change({"spec": {"decode": {"podTemplate": {"spec": spec}}}})
    harness.ready()


def test_a_quota_takes_the_job_and_names_who_is_too_large(harness: Harness):
    """Where each container has to say what it needs, the Job's does; what its podTemplate says
    wrongly is told before anything is made."""
    quota = {"kind": "ResourceQuota", "apiVersion": "v1", "metadata": {"name": "all"}}
    hard = {f"{kind}.memory": "900Gi" for kind in ("requests", "limits")}
    hard |= {f"{kind}.cpu": "900" for kind in ("requests", "limits")}
    harness.kubectl("create", "-f", "-", stdin=json.dumps({**quota, "spec": {"hard": hard}}))
    needs = {"limits": {"cpu": "1", "memory": "1Gi"}}
    roles: dict[str, Any] = {
        f"{role}__resources": needs for role in ("router", "prefill", "decode")
    }
    wrong = {
        "name": "fetch",
        "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}},
    }
    template = {"spec": {"initContainers": [wrong]}}
    harness.create(**roles, decode__podTemplate=template)
    harness.wait(lambda: harness.condition("Accepted")[1] == "PodTemplateInvalid")
    assert harness.condition("Accepted")[2].startswith("model: Job")
    assert "less than or equal to memory limit" in harness.condition("Accepted")[2]
    harness.change({"spec": {"decode": {"podTemplate": None}}})
    harness.ready()


RUNNING = JobView(name="j", succeeded=False, failed=False, report=None, problem=None)
ENDED = JobView(name="j", succeeded=True, failed=False, report=None, problem=None)
READ = JobView(name="j", succeeded=False, failed=False, report='{"ok":true}', problem=None)
CRASHED = JobView(name="j", succeeded=False, failed=False, report="Killed", problem=None)
REFUSED = JobView(name="j", succeeded=False, failed=False, report='{"ok":false}', problem=None)


STUCK = structs.replace(RUNNING, waiting=("p", 0.0), made_of="old")
PODLESS = structs.replace(RUNNING, podless_since=0.0, made_of="old")
FAILED = structs.replace(RUNNING, failed=True, made_of="old")


@pytest.mark.parametrize(
    ("job", "made_of", "waits"),
    [
        (STUCK, "new", "Queued"),
        (STUCK, "old", None),
        (PODLESS, "new", "Queued"),
        (FAILED, "new", "Queued"),
        (FAILED, "old", None),
        (structs.replace(RUNNING, made_of="old"), "new", None),
        (structs.replace(ENDED, made_of="old"), "new", None),
        (structs.replace(READ, made_of="old"), "new", None),
    ],
)
def test_who_gives_way_to_another_job(job: JobView, made_of: str, waits: str | None):
    """Who has not begun or has failed, once its pods are to be made of something else."""
    said = may_have_job(job, suspended=False, others=lambda: 9, most=2, made_of=made_of)
    assert said == waits


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
