"""What is seen becomes what is said: pods, Jobs, models, scalers, conditions. No cluster."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.operator.builders import spec

from tandem.operator.api.service import LLMServiceSpec
from tandem.operator.api.status import (
    Condition,
    ConditionType,
    LLMServiceStatus,
    ModelStatus,
    Reason,
)
from tandem.operator.clock import time_text
from tandem.operator.cluster.events import transitions
from tandem.operator.cluster.undeclared import RESTARTED_AT, is_tampered, untampered
from tandem.operator.decide import observe
from tandem.operator.decide.modelcheck import judge
from tandem.operator.decide.observe import JobView, PodView, Snapshot, WorkloadView
from tandem.operator.decide.plan import Seen, decision, see
from tandem.operator.decide.scaling import Wanted, wanted
from tandem.operator.desired.capability import unsupported
from tandem.operator.desired.compose import scalers
from tandem.operator.desired.facts import Facts
from tandem.operator.desired.naming import Identity, Role
from tandem.operator.probes.fleet import links_of
from tandem.operator.reconcile.writer import admissions, departures
from tandem.operator.settings import OperatorSettings
from tandem.protocol import names

NOW = 1_800_000_000.0
OWNER = Identity("ns", "demo", "uid")
FITS = {"ok": True, "fingerprint": "f", "numHeads": 9, "numKvHeads": 3, "maxModelLen": 8192}


def typed(**changes: Any) -> LLMServiceSpec:
    return msgspec.convert(spec(**changes), LLMServiceSpec)


def done(**report: Any) -> JobView:
    """A Job that ended with a report."""
    text = "some log\n" + json.dumps(report) + "\n"
    ok = bool(report["ok"])
    return JobView(name="job", succeeded=ok, failed=not ok, report=text, problem=None)


def container(state: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Status of a pod with one container."""
    return {"containerStatuses": [{"name": "main", "image": "img:1", "state": state, **more}]}


@pytest.mark.parametrize(
    ("status", "reason", "said"),
    [
        ({}, None, ""),
        (container({"running": {}}, ready=False, restartCount=9), None, ""),
        (container({"waiting": {"reason": "ContainerCreating"}}), None, ""),
        (container({"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}),
         Reason.IMAGE_PULL, "img:1: no such tag"),
        (container({"waiting": {"reason": "ErrImageNeverPull"}}), Reason.IMAGE_PULL, "img:1"),
        (container({"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}}),
         Reason.POD_REFUSED, "no secret"),
        (container({"waiting": {"reason": "CrashLoopBackOff"}}, lastState={
            "terminated": {"exitCode": 2, "message": "tandem decode: --dtype"}}),
         Reason.CRASH_LOOP, "exits 2: tandem decode: --dtype"),
        (container({"terminated": {"exitCode": 1, "reason": "Error"}}, restartCount=3),
         Reason.CRASH_LOOP, "exits 1"),
        ({"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                          "message": "0/1 nodes"}]}, Reason.UNSCHEDULABLE, "0/1 nodes"),
    ],
)  # fmt: skip
def test_a_pod_says_what_keeps_it(status: dict[str, Any], reason: Reason | None, said: str):
    """Only what will not pass by itself is a problem, in the kubelet's or scheduler's words."""
    problem = observe.pod_problem(status)
    if reason is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.reason is reason
        assert said in problem.message


def test_a_model_that_fits_is_ready_and_pinned():
    """A report that fits makes the model ready; it is remembered when the Job is gone."""
    verdict = judge(typed(), done(**FITS, bytes=7, revision="abc"), ModelStatus(), None)
    assert (verdict.ready, verdict.may_start) == (True, True)
    assert verdict.status.resolved_revision == "abc"
    assert judge(typed(), None, verdict.status, None).ready


def test_a_pin_belongs_to_its_source():
    """Another source forgets the pin of the one before."""
    before = judge(typed(), done(**FITS), ModelStatus(), None).status
    other = typed(model__source__persistentVolumeClaim={"claimName": "other"})
    verdict = judge(other, None, before, None)
    assert (verdict.ready, verdict.reason) == (False, Reason.CHECKING)
    assert verdict.status.fingerprint is None


@pytest.mark.parametrize(
    ("changes", "report", "reason", "said"),
    [
        ({"engine__maxModelLen": 9000}, FITS, Reason.MODEL_MISMATCH, "spec.engine.maxModelLen"),
        ({"decode__parallelism": {"tensor": 2}, "prefill__replicas": 0}, FITS,
         Reason.MODEL_MISMATCH, "spec.decode.parallelism.tensor: 2"),
        ({}, {"ok": False, "reason": "ModelNotFound", "message": "no folder"},
         Reason.MODEL_NOT_FOUND, "no folder"),
        ({}, {"ok": False, "reason": "Surprise", "message": "x"}, Reason.FETCH_FAILED, "x"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_starts_nothing(
    changes: dict[str, Any], report: dict[str, Any], reason: Reason, said: str
):
    """Pods are not made for what cannot work, and the condition names the field."""
    verdict = judge(typed(**changes), done(**report), ModelStatus(), None)
    assert (verdict.ready, verdict.reason) == (False, reason)
    assert said in verdict.message
    assert verdict.may_start is (reason is Reason.FETCH_FAILED)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine__maxModelLen": 9000}, "made for 8192"),
        ({"decode__parallelism": {"tensor": 2}}, "9 heads"),
        ({"decode__parallelism": {"tensor": 9}}, "3 KV heads"),
    ],
)
def test_a_misfit_is_one_when_the_jobs_pod_is_gone(changes: dict[str, Any], said: str):
    """What was read of the model is kept: a node that is cleaned up makes nothing fit, and a
    corrected spec is judged without another Job."""
    first = judge(typed(**changes), done(**FITS), ModelStatus(), None)
    ended = JobView(name="job", succeeded=True, failed=False, report=None, problem=None)
    for job in (ended, None):
        verdict = judge(typed(**changes), job, first.status, None)
        assert (verdict.ready, verdict.reason) == (False, Reason.MODEL_MISMATCH)
        assert said in verdict.message
        assert verdict.status == first.status
        assert judge(typed(), job, first.status, None).ready


def test_mounted_models_are_checked_beside_the_starting_pods():
    """Pods do not wait for the check of files that are mounted, but for a fetch they do."""
    assert judge(typed(), None, ModelStatus(), None).may_start
    hub = {"type": "Hub", "hub": {"repository": "a/b"}}
    cache = {"persistentVolumeClaim": {"claimName": "cache"}}
    fetched = judge(typed(model__source=hub, model__cache=cache), None, ModelStatus(), None)
    assert (fetched.may_start, fetched.reason) == (False, Reason.FETCHING)
    alone = judge(typed(model__source=hub), None, ModelStatus(), None)
    assert (alone.ready, alone.reason) == (True, Reason.NOT_NEEDED)


@pytest.mark.parametrize(
    ("changes", "asked", "expected"),
    [
        ({}, {}, (1, None)),
        ({"decode__replicas": 4}, {Role.DECODE: 9}, (4, None)),
        ({"decode__scaling": {"mode": "External"}}, {Role.DECODE: 9}, (9, None)),
        ({"decode__scaling": {"mode": "External", "maxReplicas": 3}}, {Role.DECODE: 9}, (3, 9)),
        ({"decode__scaling": {"mode": "External"}}, {Role.DECODE: 0}, (1, 0)),
    ],
)
def test_a_scaler_is_obeyed_within_bounds(
    changes: dict[str, Any], asked: dict[Role, int], expected: tuple[int, int | None]
):
    """External scaling decides within its bounds, and decode keeps one replica."""
    result = wanted(typed(**changes), Role.DECODE, asked)
    assert (result.replicas, result.clamped_from) == expected


EXTERNAL = {"prefill__scaling": {"mode": "External", "minReplicas": 2}}


def test_no_scaler_brings_prefill_workers_that_have_no_work():
    """With mode Never decode workers do both: a scaler that is there still is not asked, and none
    is made."""
    given = typed(**EXTERNAL, disaggregation__mode="Never")
    assert wanted(given, Role.PREFILL, {Role.PREFILL: 2}).replicas == 0
    assert scalers(Facts(owner=OWNER, spec=given, settings=OperatorSettings())) == {}


def test_a_scaler_leaves_a_prefill_worker_where_every_prompt_needs_one():
    """With mode Always none is no number: routers would place nothing."""
    given = typed(prefill__scaling={"mode": "External"}, disaggregation__mode="Always")
    assert wanted(given, Role.PREFILL, {Role.PREFILL: 0}) == Wanted(1, 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"kvTransfer__connector": "CudaP2P"}, "spec.kvTransfer.connector"),
        ({"decode__parallelism": {"pipeline": 2}}, "spec.decode.parallelism.pipeline"),
        ({"prefill__nodesPerReplica": 2}, "spec.prefill.nodesPerReplica"),
        ({"kvTransfer__integrity": "Digest"}, "spec.kvTransfer.integrity"),
    ],
)
def test_what_a_release_cannot_do_is_said(changes: dict[str, Any], said: str | None):
    """A field that this version would ignore is refused by its name."""
    problem = unsupported(typed(**changes))
    assert (problem is None) if said is None else (problem is not None and said in problem)


def pod(name: str, *, ready: bool = True, age: float = 100, **annotations: str) -> PodView:
    return PodView(
        name=name, uid=name, ip=None, role=Role.DECODE, revision="r", ready=ready, deleting=False,
        created=NOW - age, pending_since=None, problem=None, key_generation=1,
        annotations={f"tandem.dev/{key}": value for key, value in annotations.items()},
    )  # fmt: skip


def test_the_pod_that_leaves_is_chosen_with_care():
    """Those already marked go first, then those not ready, then the youngest."""
    three = [pod("old"), pod("young", age=5), pod("broken", ready=False)]
    workload = {(Role.DECODE, "r"): WorkloadView(name="d", asked=3, existing=3, refused=None)}

    def chosen(count: int, pods: list[PodView]) -> set[str]:
        made = departures(pods, workload, {(Role.DECODE, "r"): count})
        return {each.pod for marked in made.values() for each in marked}

    assert chosen(2, three) == {"broken"}
    assert chosen(1, three) == {"broken", "young"}
    assert chosen(3, three) == set()
    marked = [pod("old", draining="true"), pod("young", age=5)]
    assert chosen(3, marked) == {"old"}  # the mark is taken back


def test_pods_of_admitted_revisions_are_marked_once():
    """An admitted revision's pods get the annotation, and no second one."""
    made = admissions([pod("new"), pod("known", admitted="true")], {(Role.DECODE, "r")})
    assert [(each.pod, each.annotations) for each in made] == [
        ("new", {names.ANNOTATION_ADMITTED: "true"})
    ]


def owned(manager: str, fields: dict[str, Any], kind: str = "NetworkPolicy", **more: Any):
    entry = {"manager": manager, "fieldsV1": fields, **more}
    return {"kind": kind, "metadata": {"managedFields": [entry]}}


def test_foreign_writers_are_noticed_where_nobody_else_writes():
    """An edit by hand is noticed; controllers' status and clouds' fields are not one."""
    assert is_tampered(owned("kubectl-edit", {"f:spec": {"f:ingress": {}}}))
    assert not is_tampered(owned("tandem-operator", {"f:spec": {}}))
    assert not is_tampered(owned("kube-controller-manager", {"f:status": {}}))
    assert not is_tampered(owned("x", {"f:spec": {}}, subresource="status"))
    assert not is_tampered(owned("cloud", {"f:spec": {"f:loadBalancerClass": {}}}, "Service"))
    assert is_tampered(owned("kubectl", {"f:spec": {"f:ports": {}}}, "Service"))


def test_a_restart_by_hand_is_left_alone():
    """What `kubectl rollout restart` writes stays, also where an edit beside it is taken back."""
    pods: dict[str, Any] = {"f:metadata": {"f:annotations": {".": {}, f"f:{RESTARTED_AT}": {}}}}
    assert not is_tampered(owned("kubectl-rollout", {"f:spec": {"f:template": pods}}))
    more = {"f:template": pods, "f:replicas": {}}
    assert is_tampered(owned("kubectl-rollout", {"f:spec": more}))
    template: dict[str, Any] = {"metadata": {"labels": {}}}
    wanted = {"metadata": {"name": "d"}, "spec": {"template": template}}
    annotated = {"metadata": {"annotations": {RESTARTED_AT: "today", "stranger": "x"}}}
    live = {"metadata": {"name": "d", "resourceVersion": "7"}, "spec": {"template": annotated}}
    put = untampered(wanted, live)
    assert put["spec"]["template"]["metadata"]["annotations"] == {RESTARTED_AT: "today"}
    assert "annotations" not in template["metadata"]


def test_links_are_counted_from_the_routers_words():
    """Peers that are up, less what is quarantined, of the pairs that should be."""
    fleet = {
        "workers": [
            {"incarnation": "c", "peers": {"a": True, "b": False}},
            {"incarnation": "d", "peers": {"a": True, "b": True}},
        ],
        "quarantined": [{"prefill": "a", "decode": "c", "cause": "digest"}],
    }
    links = links_of(fleet, 4)
    assert (links.healthy, links.total) == (2, 4)
    assert links.quarantined == ["a to c: digest"]
    fleet["workers"] = [{"compatibility": "x", "peers": {"a": False}}, {"compatibility": "y"}]
    assert "KV of 2 kinds" in links_of(fleet, 1).quarantined[-1]


def condition(kind: ConditionType, status: Any, reason: Reason) -> Condition:
    return Condition(type=kind, status=status, reason=reason, last_transition_time=time_text(NOW))


def test_events_tell_transitions_only():
    """The same state is told once; what every new service goes through is not told."""
    starting = condition(ConditionType.DECODE_READY, "False", Reason.STARTING)
    refused = condition(ConditionType.ACCEPTED, "False", Reason.UNSUPPORTED)
    ready = condition(ConditionType.DECODE_READY, "True", Reason.REPLICAS_READY)
    assert transitions([], [starting, refused]) == [refused]
    assert transitions([starting, refused], [starting, refused]) == []
    assert transitions([starting], [ready]) == [ready]


def test_a_spec_that_may_not_move_keeps_its_targets():
    """While a change is refused, replicas still follow the revision that serves."""
    empty = Snapshot({})
    first = typed()
    facts = Facts(owner=OWNER, spec=first, settings=OperatorSettings())
    seen: Seen = see(OWNER, 1, first, LLMServiceStatus(), empty)
    assert decision(seen, facts, may_move=False, servable=frozenset(), now=NOW).counts == {}
    begun = decision(seen, facts, may_move=True, servable=frozenset(), now=NOW)
    assert begun.counts[(Role.DECODE, facts.revision(Role.DECODE))] == 1
    changed = typed(engine__maxNumSeqs=3, decode__replicas=2)
    status = LLMServiceStatus(rollout=begun.memory)
    later = Facts(owner=OWNER, spec=changed, settings=OperatorSettings())
    held = decision(
        see(OWNER, 2, changed, status, empty), later, may_move=False, servable=frozenset(), now=NOW
    )
    assert held.counts[(Role.DECODE, facts.revision(Role.DECODE))] == 2
    assert (Role.DECODE, later.revision(Role.DECODE)) not in held.counts


def test_a_source_is_told_apart_by_what_is_asked_for():
    """The digest of a source changes with the source and with nothing else."""
    assert typed().model.digest == typed(decode__replicas=3).model.digest
    other = typed(model__source__persistentVolumeClaim__path="x")
    assert typed().model.digest != other.model.digest
