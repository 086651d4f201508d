"""A model that is not there or cannot be fetched: told in time, in words, and got over."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.operator.builders import spec
from tests.operator.harness import Harness
from tests.operator.node import Node, Pod, container_status, waiting

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import ModelStatus, Reason
from tandem.operator.decide import observe
from tandem.operator.decide.modelcheck import ModelVerdict, judge
from tandem.protocol import names

pytestmark = pytest.mark.full

NOW = 1_800_000_000.0
MISSING = {"ok": False, "reason": "ModelNotFound", "message": "model: there is no folder /models/x"}
BROKEN = {"ok": False, "reason": "FetchFailed", "message": "the hub does not answer"}
HUB: dict[str, Any] = {
    "model__source": {"type": "Hub", "hub": {"repository": "a/b"}},
    "model__cache": {"persistentVolumeClaim": {"claimName": "models"}},
}


def attempt(report: Any, *, uid: str = "job", made: str = "2027-01-15T08:00:00Z") -> Pod:
    """A pod of the model's Job that ended with a report, or that waits for None."""
    ended = {"terminated": {"exitCode": 1, "message": json.dumps(report)}}
    state = {"waiting": {"reason": "ContainerCreating"}} if report is None else ended
    owner = {"kind": "Job", "uid": uid}
    metadata = {"name": "pod", "creationTimestamp": made, "ownerReferences": [owner]}
    return {
        "metadata": metadata,
        "status": {"containerStatuses": [container_status("fetch", state)]},
    }


def verdict(*pods: Pod, over: str = "", late: float = 0.0, **changes: Any) -> ModelVerdict:
    """What is said of a Job with these pods; ``over`` is its last condition."""
    conditions = [{"type": over, "status": "True"}] if over else []
    metadata = {"name": "the-job", "uid": "job", "creationTimestamp": "2027-01-15T08:00:00Z"}
    item = {"metadata": metadata, "status": {"conditions": conditions}}
    typed = msgspec.convert(spec(**changes), LLMServiceSpec)
    began = 1_800_000_000.0
    return judge(typed, observe.job(item, pods), ModelStatus(), None, now=began + late)


def test_a_missing_model_is_told_by_the_first_attempt():
    """Nobody waits for a Job that tries again what cannot change, and the field is named."""
    said = verdict(attempt(MISSING))
    assert (said.ready, said.reason, said.non_retryable) == (False, Reason.MODEL_NOT_FOUND, True)
    assert "no folder /models/x" in said.message
    assert "spec.model.source.persistentVolumeClaim" in said.message
    assert "delete Job the-job" in said.message


def test_what_failed_is_tried_again_before_it_is_given_up():
    """While the Job tries again it is fetching and says after what; then it has failed."""
    trying = verdict(attempt(BROKEN), **HUB)
    assert (trying.reason, trying.non_retryable) == (Reason.FETCHING, False)
    assert "the hub does not answer" in trying.message
    over = verdict(attempt(BROKEN), over="Failed", **HUB)
    assert (over.reason, over.non_retryable, over.may_start) == (Reason.FETCH_FAILED, True, False)
    assert "delete it to try again" in over.message


def test_a_job_that_does_not_begin_is_told_of():
    """A pod that waits for a volume or a node for a minute is named, and how to look at it."""
    assert verdict(attempt(None), late=30).reason is Reason.CHECKING
    late = verdict(attempt(None), late=90)
    assert (late.reason, late.may_start) == (Reason.JOB_STUCK, True)
    assert "kubectl describe pod pod" in late.message
    assert verdict(attempt(BROKEN), late=90).reason is Reason.CHECKING


def test_a_job_without_a_pod_is_told_of():
    """A quota or a policy may refuse what it would make, of which the Job itself says nothing."""
    assert verdict(late=30, **HUB).reason is Reason.FETCHING
    late = verdict(late=90, **HUB)
    assert (late.ready, late.reason) == (False, Reason.JOB_STUCK)
    assert "Job the-job has no pod" in late.message
    assert "kubectl describe job the-job" in late.message


def test_pods_of_an_earlier_job_say_nothing():
    """The report of a Job that was deleted is not the report of its successor."""
    assert verdict(attempt(MISSING, uid="earlier")).reason is Reason.CHECKING


def ends_with(report: dict[str, Any], code: int, *, when_it_reads: str) -> Any:
    """A rule: Jobs that read ``when_it_reads`` end like this, and workers do not start."""

    def rule(pod: Pod) -> Pod | None:
        arguments = pod["spec"]["containers"][0].get("args") or []
        if when_it_reads not in " ".join(arguments):
            return None
        if "prepare" not in arguments:
            return waiting("CreateContainerError", "no such folder")
        ended = {"exitCode": code, "message": json.dumps(report)}
        container = container_status("fetch", {"terminated": ended})
        return {"phase": "Failed", "containerStatuses": [container]}

    return rule


NOWHERE = {"persistentVolumeClaim": {"claimName": "models", "path": "nowhere"}}
SOMEWHERE = {"persistentVolumeClaim": {"claimName": "models", "path": "smollm2"}}


@pytest.mark.parametrize("code", [1, names.EXIT_MODEL_REFUSED])
def test_a_missing_model_is_a_condition_in_time_and_is_got_over(
    harness: Harness, node: Node, code: int
):
    """ModelReady, Progressing and Degraded say so within seconds; a corrected source serves."""
    node.rules.append(ends_with(MISSING, code, when_it_reads="nowhere"))
    harness.create(model__source={"type": "PersistentVolumeClaim", **NOWHERE})
    harness.wait(lambda: harness.condition("ModelReady")[1] == "ModelNotFound")
    assert harness.condition("ModelReady")[0] == "False"
    assert harness.condition("Progressing")[:2] == ("False", "ModelNotFound")
    assert harness.condition("Degraded")[:2] == ("True", "ModelNotFound")
    assert harness.condition("Ready")[:2] == ("False", "ModelNotFound")
    harness.change({"spec": {"model": {"source": SOMEWHERE}}})
    harness.ready()
    harness.wait(lambda: harness.condition("Degraded")[0] == "False")
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable")


@pytest.mark.nightly
def test_a_service_goes_on_serving_when_its_next_model_is_missing(harness: Harness, node: Node):
    """The revision that serves keeps its replicas; the new one is taken back at once."""
    harness.create()
    harness.ready()
    before = harness.replicas()
    node.rules.append(ends_with(MISSING, names.EXIT_MODEL_REFUSED, when_it_reads="nowhere"))
    harness.change({"spec": {"model": {"source": NOWHERE}}})
    harness.wait(lambda: harness.condition("Degraded")[:2] == ("True", "ModelNotFound"))
    harness.wait(lambda: {n: c for n, c in harness.replicas().items() if c} == before)
    assert harness.condition("Ready")[0] == "True"
    node.rules.clear()
    jobs = [name for name in harness.names("Job") if "model" in name]
    for name in jobs:
        harness.cluster.delete("Job", harness.namespace, name)
    harness.wait(lambda: harness.condition("Progressing")[1] == "Stable", 60, "rolled after all")
    harness.wait(lambda: harness.condition("Degraded")[0] == "False")
    assert set(harness.replicas()) != set(before)
