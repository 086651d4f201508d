"""What the API server refuses of one child keeps back what depends on it, and nothing else; all is
told. On a cluster in memory, which refuses what a test says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.operator.in_memory import KEY, Demo, Item, Refusal

from tandem.operator.cluster import ClusterError
from tandem.operator.desired.naming import Role
from tandem.protocol import names

BAD: dict[str, Any] = {"router__service": {"annotations": {"my key": "x"}}}
QUOTA = (403, "exceeded quota: few, requested: count/deployments.apps=1, used: 3, limited: 3")
WEBHOOK = (500, 'failed calling webhook "x.y": connection refused')
MODELS: dict[str, Any] = {
    path: {"model__source__persistentVolumeClaim": {"claimName": "models", "path": path}}
    for path in ("a", "b")
}


def bad_annotation(_verb: str, item: Item) -> Refusal | None:
    """A Service with a key that is none."""
    bad = "my key" in (item["metadata"].get("annotations") or {})
    return (422, 'metadata.annotations: Invalid value: "my key"') if bad else None


def refusal_of(verb: str, kind: str, part: str = "", said: Refusal = QUOTA) -> Any:
    """Refuses a verb for objects of a kind whose names have this part."""

    def refuse(tried: str, item: Item) -> Refusal | None:
        fits = (tried, item["kind"]) == (verb, kind) and part in item["metadata"]["name"]
        return said if fits else None

    return refuse


def unadmitted(verb: str, item: Item) -> Refusal | None:
    """That routers may use a pod cannot be said."""
    notes = item["metadata"].get("annotations") or {}
    fits = verb == "patch" and names.ANNOTATION_ADMITTED in notes
    return (403, "no annotations today") if fits else None


def total(served: Demo) -> dict[str, int]:
    return {role: sum(served.replicas(role).values()) for role in Role}


def test_a_refused_service_holds_back_neither_counts_nor_words(demo: Callable[..., Demo]):
    """Fewer replicas are asked for, a suspension holds, pods that are dead are told and canaries
    asked, while the Service cannot be as the spec has it."""
    served = demo(decode__replicas=3)
    served.cluster.refuse = bad_annotation
    served.change(decode__replicas=1, **BAD)
    served.turn()
    assert served.failure is not None, "counted, and tried again"
    assert total(served) == {"prefill": 1, "decode": 1, "router": 2}
    assert served.condition("Accepted")[:2] == ("False", "ChildRefused")
    assert "my key" in served.condition("Accepted")[2]
    served.probes.is_right = False
    served.turn(2, is_ready=lambda _pod: False)
    assert served.condition("Servable")[1] == "CanaryFailed"
    served.turn(is_ready=lambda _pod: False)
    assert served.condition("Ready")[0] == "False"
    assert served.condition("DecodeReady")[2] == "0 of 1 ready"
    served.change(suspend=True, **BAD)
    served.turn(2)
    assert total(served) == {"prefill": 0, "decode": 0, "router": 0}
    assert served.condition("Servable")[:2] == ("False", "Suspended")
    assert served.condition("Ready")[:2] == ("False", "ChildRefused")
    assert served.status()["observedGeneration"] == 3


def test_nobody_is_marked_who_does_not_leave(demo: Callable[..., Demo]):
    """A pod hears that it leaves just before its Deployment falls, and where that is held back, not
    at all; that it could not be told is no reason to stay."""
    served = demo(decode__replicas=3, prefill__replicas=2)
    served.change(decode__replicas=1, prefill__replicas=1)
    served.look()
    told = [(verb, name.split("-")[1]) for verb, kind, name in served.cluster.writes]
    assert [each for each in told if each[1] in ("prefill", "decode")] == [
        ("patch", "decode"),
        ("patch", "decode"),
        ("apply", "decode"),
        ("patch", "prefill"),
        ("apply", "prefill"),
    ]
    served.cluster.run()
    served.cluster.refuse = refusal_of("patch", "Pod", said=(403, "not this one"))
    served.change(suspend=True)
    served.turn()
    assert total(served) == {"prefill": 0, "decode": 0, "router": 0}
    assert served.marked() == set()
    assert served.condition("Accepted")[0] == "True"


@pytest.mark.full
def test_what_serves_does_not_fall_for_what_was_refused(demo: Callable[..., Demo]):
    """In place the old decode worker gives its replica only to a new one that may be made; whatever
    the names are by whose order they are written."""
    for number in range(3, 7):
        served = demo(rollout__surge="Never", prefill__replicas=2)
        served.cluster.refuse = refusal_of("create", "Deployment", "decode")
        served.change(rollout__surge="Never", prefill__replicas=2, engine__maxNumSeqs=number)
        served.turn(6)
        assert list(served.replicas("decode").values()) == [1]
        assert not [name for name in served.marked() if "decode" in name]
        assert served.condition("Accepted")[:2] == ("False", "QuotaExceeded")
        assert served.condition("Ready")[0] == "True"
        served.cluster.refuse = lambda _verb, _item: None
        served.turn(12)
        assert served.condition("Progressing")[1] == "Stable"
        assert list(served.replicas("decode").values()) == [1]


def test_a_revision_that_is_refused_has_a_deadline(
    demo: Callable[..., Demo], monkeypatch: pytest.MonkeyPatch
):
    """It is taken back like any other; what it never had is not made to be taken back."""
    short: dict[str, Any] = {"rollout__progressDeadlineSeconds": 60, "decode__replicas": 2}
    served = demo(**short)
    served.cluster.refuse = refusal_of("create", "Deployment")
    served.change(engine__maxNumSeqs=7, **short)
    served.turn()
    rollout, there = served.status()["rollout"], served.replicas("decode")
    assert rollout["targets"] != rollout["stable"]
    later = time.time() + 100
    monkeypatch.setattr(time, "time", lambda: later)
    served.turn(2)
    assert served.condition("Degraded")[1] == "ProgressDeadlineExceeded"
    assert served.condition("Accepted")[0] == "True", "nothing is tried any more"
    assert served.replicas("decode") == there


@pytest.mark.parametrize("looks", [0, 2])
def test_a_revision_that_could_not_be_made_is_tried_when_that_is_mended(
    demo: Callable[..., Demo], monkeypatch: pytest.MonkeyPatch, looks: int
):
    """The annotation is no part of it, and its deadline begins anew, whether or not anybody has
    looked since that passed. One whose pods did not serve is not tried again for other counts."""
    short: dict[str, Any] = {"rollout__progressDeadlineSeconds": 60}
    served = demo(**short)
    old = served.replicas("decode").keys()
    served.cluster.refuse = bad_annotation
    served.change(engine__maxNumSeqs=7, **short, **BAD)
    served.turn(2)
    ahead, real = [100.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    served.turn(looks)
    assert ("failed" in served.status()["rollout"]) == (looks > 0)
    served.change(engine__maxNumSeqs=7, **short)
    served.turn(12)
    assert served.condition("Progressing")[1] == "Stable"
    assert served.condition("Degraded")[0] == "False"
    assert served.replicas("decode").keys().isdisjoint(old)
    served.probes.is_right = False
    served.change(engine__maxNumSeqs=8, **short)
    served.turn(4)
    ahead[0] += 100
    served.turn(2)
    assert served.condition("Degraded")[1] == "ProgressDeadlineExceeded"
    served.change(engine__maxNumSeqs=8, **short, decode__replicas=2)
    served.turn(4)
    assert served.condition("Degraded")[1] == "ProgressDeadlineExceeded"


@pytest.mark.parametrize("kind", ["ConfigMap", "NetworkPolicy", "Secret"])
def test_nothing_new_is_made_beside_a_base_that_is_not_whole(kind: str):
    """No pod, no Job: they would lack a key or a policy. They come when it is."""
    new = Demo()
    new.cluster.refuse = refusal_of("create", kind)
    new.turn(2)
    assert new.condition("Accepted")[:2] == ("False", "QuotaExceeded")
    assert new.condition("Ready")[:2] == ("False", "QuotaExceeded")
    assert not [*new.cluster.of("Deployment"), *new.cluster.of("Job"), *new.cluster.of("Pod")]
    assert new.cluster.of("ServiceAccount"), "others were written"
    new.cluster.refuse = lambda _verb, _item: None
    new.turn(6)
    assert new.condition("Ready")[0] == "True"
    new.close()


def test_nor_is_what_was_accepted_before(demo: Callable[..., Demo]):
    """A revision whose Deployments could not be made yet waits for its base, too."""
    served = demo()
    there = {role: served.replicas(role) for role in Role}
    served.cluster.refuse = refusal_of("create", "Deployment")
    served.change(engine__maxNumSeqs=7)
    served.turn()
    served.cluster.delete("ConfigMap", KEY[0], "demo-peers")
    served.cluster.refuse = refusal_of("create", "ConfigMap")
    served.turn(2)
    assert {role: served.replicas(role) for role in Role} == there
    served.cluster.refuse = lambda _verb, _item: None
    served.turn(12)
    assert served.condition("Progressing")[1] == "Stable"


def test_what_is_there_is_scaled_beside_a_base_that_is_refused(demo: Callable[..., Demo]):
    """A new spec waits; counts do not. Keys that could not be published do not count as read."""
    served = demo(decode__replicas=2)
    before = served.status()["keys"]
    served.cluster.refuse = refusal_of("apply", "ConfigMap", said=(403, "closed for the night"))
    rotated: dict[str, Any] = {"security__keyRotationID": "x", "engine__maxNumSeqs": 7}
    served.change(decode__replicas=3, **rotated)
    served.turn(2)
    assert list(served.replicas("decode").values()) == [3]
    assert served.condition("Accepted")[:2] == ("False", "ChildRefused")
    assert served.status()["keys"] == before
    served.cluster.refuse = lambda _verb, _item: None
    served.turn()
    assert served.status()["keys"]["generation"] == 2


def test_nothing_is_thrown_away_while_something_is_refused(demo: Callable[..., Demo]):
    """The rest of an old revision goes when all is as it shall be."""
    served = demo()
    old = served.replicas("decode").keys()
    served.cluster.refuse = bad_annotation
    served.change(engine__maxNumSeqs=7, **BAD)
    served.turn(3)
    assert served.replicas("decode").keys() == old, "nothing new without its Service"
    served.change(engine__maxNumSeqs=7)
    served.turn(1)
    served.change(engine__maxNumSeqs=7, **BAD)
    served.turn(12)
    assert served.condition("Servable")[0] == "True"
    assert served.replicas("decode").keys() > old
    served.change(engine__maxNumSeqs=7)
    served.turn(3)
    assert len(served.replicas("decode")) == 1
    assert not served.replicas("decode").keys() & old


def test_the_last_routers_that_clients_reach_stay(demo: Callable[..., Demo]):
    """New routers are no use to clients whom the Service cannot send there."""
    served = demo(**MODELS["a"])
    old = served.replicas("router").keys()
    served.change(**MODELS["b"])
    served.turn()
    served.change(**MODELS["b"], **BAD)
    served.cluster.refuse = bad_annotation
    served.turn(12)
    (service,) = served.cluster.of("Service")
    (name,) = old
    assert service["spec"]["selector"]["tandem.dev/revision"] in name
    assert served.replicas("router")[name] > 0
    served.change(**MODELS["b"])
    served.turn(6)
    assert served.condition("Progressing")[1] == "Stable"
    assert name not in served.replicas("router")


@pytest.mark.parametrize("said", [WEBHOOK, (429, "too many requests"), (0, "timed out")])
def test_a_spec_that_cannot_be_tried_is_told_and_scaled(demo: Callable[..., Demo], said: Refusal):
    """A webhook that is away: nothing of a new revision moves, counts and suspension do."""
    served = demo()

    def late(verb: str, _item: Item) -> Refusal | None:
        if verb == "try" and said[0] == 0:
            raise ClusterError(0, "ReadTimeoutError", said[1])
        return said if verb == "try" else None

    served.cluster.refuse = late
    served.change(decode__replicas=3, engine__maxNumSeqs=7)
    served.turn(2)
    assert served.failure is not None
    assert list(served.replicas("decode").values()) == [3]
    assert served.condition("Accepted")[0] == "Unknown"
    assert said[1] in served.condition("Accepted")[2]
    assert served.condition("Ready")[0] == "True"
    served.change(suspend=True, engine__maxNumSeqs=7)
    served.turn()
    assert total(served) == {"prefill": 0, "decode": 0, "router": 0}
    served.cluster.refuse = lambda _verb, _item: None
    served.turn()
    assert served.condition("Accepted")[0] == "True"


def test_what_the_spec_names_may_be_unreadable(demo: Callable[..., Demo]):
    """That nobody tells whether the claim is there is no reason to stop what goes on."""
    served = demo()
    served.succeed()
    served.cluster.refuse = refusal_of("get", "PersistentVolumeClaim", said=(503, "not now"))
    served.change(decode__replicas=2)
    served.turn()
    assert list(served.replicas("decode").values()) == [2]
    assert served.condition("Accepted")[0] == "Unknown"
    assert "not now" in served.condition("Accepted")[2]


@pytest.mark.parametrize("status", [0, 401, 429])
def test_a_look_ends_with_the_connection(demo: Callable[..., Demo], status: int):
    """What is said of no object ends the look at once; the queue tries again."""
    served = demo()
    before = served.status()
    served.cluster.refuse = lambda verb, _item: (status, "gone") if verb == "apply" else None
    served.change(decode__replicas=2, **BAD)
    served.turn()
    assert served.failure is not None
    assert (served.failure.status, served.cluster.writes) == (status, [])
    assert served.status() == before


def test_workers_that_routers_may_not_use_take_nobodys_place(demo: Callable[..., Demo]):
    """New workers are ready and could not be admitted: the old ones stay."""
    served = demo()
    old = served.replicas("decode")

    served.cluster.refuse = unadmitted
    served.change(engine__maxNumSeqs=7)
    served.turn(10)
    assert served.replicas("decode").items() > old.items()
    assert served.condition("Accepted")[:2] == ("False", "ChildRefused")
    served.cluster.refuse = lambda _verb, _item: None
    served.turn(6)
    assert served.condition("Progressing")[1] == "Stable"


def test_nor_do_routers_that_would_use_them(demo: Callable[..., Demo]):
    """Another model's routers are up, and its workers could not be admitted: the old ones stay, and
    clients stay with them."""
    served = demo(**MODELS["a"])
    (old,) = served.replicas("router")

    served.cluster.refuse = unadmitted
    served.change(**MODELS["b"])
    served.turn(10)
    assert served.replicas("router")[old] > 0
    (service,) = served.cluster.of("Service")
    assert service["spec"]["selector"]["tandem.dev/revision"] in old
    for each in served.cluster.of("Deployment"):
        wanted = served.repairs._wrong(KEY, each, deleted=True)
        assert wanted is not None
        assert wanted["spec"]["replicas"] == each["spec"]["replicas"], "none is put right to less"
    served.cluster.refuse = lambda _verb, _item: None
    served.turn(8)
    assert served.condition("Progressing")[1] == "Stable"
    assert old not in served.replicas("router")
