"""Pods to workers: whose address counts, what a pod says, and how one leaves."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.router.behaviours import ANSWER, Make
from tests.router.builders import Stack, make_request, tokens_of
from tests.waiting import until

from tandem.protocol.card import PROTOCOL_VERSION, WorkerRole
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import (
    ANNOTATION_ADMITTED,
    ANNOTATION_DRAINING,
    LABEL_REVISION,
    LABEL_ROLE,
    WORKER_PORT,
)
from tandem.router.app import create_app
from tandem.router.config import RouterConfig
from tandem.router.workers import discovery as kubernetes
from tandem.router.workers.connection import WorkerNote
from tandem.router.workers.discovery import KubernetesDiscovery, PodBook, PodFacts, facts_of

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def pod(
    uid: str = "u1",
    ip: str | None = "10.0.0.1",
    *,
    created: str = "2026-01-01T11:00:00Z",
    phase: str = "Running",
    annotations: dict[str, str] | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    """A Pod's JSON, of what discovery reads."""
    return {
        "metadata": {
            "uid": uid,
            "name": f"pod-{uid}",
            "creationTimestamp": created,
            "labels": {LABEL_REVISION: "r1", LABEL_ROLE: "decode"},
            "annotations": annotations,
            **metadata,
        },
        "status": {"podIP": ip, "phase": phase},
    }


def test_a_running_pod_is_a_worker() -> None:
    """By its address and the worker's port, with what its labels say."""
    facts = facts_of(pod(annotations={ANNOTATION_ADMITTED: "true"}))

    assert facts.endpoint == f"10.0.0.1:{WORKER_PORT}"
    assert facts.note == WorkerNote(pod="pod-u1", role="decode", revision="r1", admitted=True)
    assert facts.leave_ms is None
    assert facts_of(pod(ip="fd00::1")).endpoint == f"[fd00::1]:{WORKER_PORT}"


@pytest.mark.parametrize("changes", [{"ip": None}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_a_pod_without_a_worker_has_no_address(changes: dict[str, Any]) -> None:
    """Before it has an IP, and after its end, when somebody else may have it."""
    assert facts_of(pod(**changes)).endpoint is None


@pytest.mark.parametrize(
    ("ends", "left"),
    [
        ("2026-01-01T12:00:20Z", 20_000),
        ("2026-01-01T11:59:00Z", 0),
        ("2027-01-01T00:00:00Z", 30_000),
    ],
)
def test_a_pod_that_is_deleted_leaves(ends: str, left: int) -> None:
    """With what is left of its grace, never more than all of it whatever the clocks say."""
    facts = facts_of(pod(deletionTimestamp=ends, deletionGracePeriodSeconds=30), NOW)

    assert facts.note.leaving
    assert facts.leave_ms == left
    marked = facts_of(pod(annotations={ANNOTATION_DRAINING: "true"}))
    assert marked.note.leaving
    assert marked.leave_ms is None


def test_of_two_pods_with_one_address_the_younger_counts() -> None:
    """An object may linger after its address went to another."""
    book = PodBook()
    book.replace([pod("young", created="2026-01-01T11:30:00Z"), pod("old")])
    assert [each.uid for each in book.by_endpoint().values()] == ["young"]
    book.apply("DELETED", pod("young"))
    assert [each.uid for each in book.by_endpoint().values()] == ["old"]


def test_a_list_makes_up_for_lost_events() -> None:
    """What is not in it is gone, what is new in it is there; bookmarks are passed over."""
    book = PodBook()
    book.apply("ADDED", pod("a", "10.0.0.1"))
    book.apply("BOOKMARK", {"metadata": {}})
    book.replace([pod("b", "10.0.0.2")])

    assert list(book.by_endpoint()) == [f"10.0.0.2:{WORKER_PORT}"]


def test_a_selector_is_refused_with_workers_and_outside_a_pod(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        InvalidParameter, match=r"discovery_selector: 'a=b' is not allowed; none with"
    ):
        RouterConfig(discovery_selector="a=b", workers=("127.0.0.1:1",), allow_plaintext=True)
    monkeypatch.delenv("TANDEM_POD_NAMESPACE", raising=False)
    with pytest.raises(InvalidParameter, match=r"discovery_selector.*none outside a pod"):
        create_app(RouterConfig(discovery_selector="a=b", allow_plaintext=True))
    monkeypatch.setenv("TANDEM_POD_NAMESPACE", "home")
    assert kubernetes.own_namespace("a=b") == "home"


class Counter:
    def discovery_failed(self) -> None:
        """One more."""


def discovery(stack: Stack) -> KubernetesDiscovery:
    """Over the stack's pool, told by hand."""
    return KubernetesDiscovery(stack.pool, namespace="n", selector="s", counter=Counter())


def found(*workers: Any, **note: Any) -> dict[str, PodFacts]:
    leave = note.pop("leave_ms", None)
    return {
        worker.endpoint: PodFacts(
            f"uid-{worker.endpoint}", "", worker.endpoint, WorkerNote(**note), leave
        )
        for worker in workers
    }


async def test_pods_come_and_go(stack: Stack, decode: Make) -> None:
    """A found one serves; one that is gone is forgotten, and another goes on."""
    d1, d2 = decode(), decode()
    finder = discovery(stack)
    finder.apply(found(d1))
    await until(lambda: d1.incarnation in stack.pool.workers)
    assert tokens_of(await stack.run(make_request())) == ANSWER
    finder.apply(found(d2))

    await until(lambda: list(stack.pool.workers) == [d2.incarnation])
    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert len(d2.submitted) == 1


async def test_a_discovery_that_begins_anew_knows_whom_the_last_one_found(
    stack: Stack, decode: Make
) -> None:
    """Pods that went in between are forgotten; those that are still there are left alone."""
    gone, stays, new = decode(), decode(), decode()
    discovery(stack).apply(found(gone, stays))
    await until(lambda: len(stack.pool.workers) == 2)
    discovery(stack).apply(found(stays, new))

    assert set(stack.pool.links()) == {stays.endpoint, new.endpoint}
    await until(lambda: set(stack.pool.workers) == {stays.incarnation, new.incarnation})
    assert stays.num_greeted == 1


async def test_a_leaving_pod_is_told_and_gets_nothing_new(stack: Stack, decode: Make) -> None:
    """At once by its deletion, before its own word; the command says how long it has."""
    d1, d2 = decode(), decode()
    finder = discovery(stack)
    finder.apply(found(d1) | found(d2))
    await until(lambda: len(stack.pool.workers) == 2)
    finder.apply(found(d1, leaving=True, leave_ms=20_000) | found(d2))
    finder.apply(found(d1, leaving=True, leave_ms=19_000) | found(d2))

    for _ in range(3):
        await stack.run(make_request())
    assert (len(d1.submitted), len(d2.submitted)) == (0, 3)
    await until(lambda: d1.commands)
    assert [each.args for each in d1.commands] == [{"grace_ms": 20_000}]
    assert stack.pool.up(WorkerRole.DECODE) == [stack.pool.workers[d2.incarnation]]


async def test_only_admitted_revisions_serve_users(stack: Stack, decode: Make) -> None:
    """A new one waits for its canary; where nobody is admitted, all are."""
    old, new = decode(), decode()
    finder = discovery(stack)
    finder.apply(found(old, revision="r1", admitted=True) | found(new, revision="r2"))
    await until(lambda: len(stack.pool.workers) == 2)
    for _ in range(3):
        await stack.run(make_request())
    assert (len(old.submitted), len(new.submitted)) == (3, 0)

    finder.apply(found(new, revision="r2"))
    assert tokens_of(await stack.run(make_request())) == ANSWER


@pytest.mark.parametrize("said", ["this worker speaks 1", "here it is 1"])
async def test_a_router_serves_by_workers_of_its_own_protocol(
    stack: Stack, decode: Make, said: str
) -> None:
    """While releases change, the admitted workers may all be of the other one: they do not hold
    back those of this router's own, and the reason is given while there are none. Each release has
    its own words."""
    old, new = decode(), decode()
    old.refusal = f"protocol {PROTOCOL_VERSION}; {said}"
    finder = discovery(stack)
    finder.apply(found(old, revision="r1", admitted=True))
    await until(lambda: bool(stack.pool.other_wires()))
    problem = stack.fleet.servable(prefill=0, decode=1)
    assert problem is not None
    assert said in problem

    finder.apply(found(old, revision="r1", admitted=True) | found(new, revision="r2"))
    await until(lambda: stack.fleet.servable(prefill=0, decode=1) is None)
    assert tokens_of(await stack.run(make_request())) == ANSWER
    assert (len(old.submitted), len(new.submitted)) == (0, 1)


async def test_another_refusal_is_no_other_protocol(stack: Stack, decode: Make) -> None:
    """A worker that is admitted and refuses for now still keeps others from users."""
    old, new = decode(), decode()
    old.refusal = "no more links"
    finder = discovery(stack)
    finder.apply(found(old, revision="r1", admitted=True) | found(new, revision="r2"))
    await until(lambda: bool(stack.pool.workers))
    assert stack.pool.other_wires() == {}
    assert stack.fleet.servable(prefill=0, decode=1) is not None


def test_the_api_server_is_asked_by_its_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a pod the address that the kubelet gave counts: discovery goes on without the DNS."""
    for name, text in (("TOKEN", "secret"), ("CERT", "authority")):
        (tmp_path / name).write_text(text)
        where = f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME"
        monkeypatch.setattr(where, str(tmp_path / name))
    missing = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(missing, str(tmp_path / "none"))
    monkeypatch.setattr("kubernetes.config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert kubernetes._core_api().api_client.configuration.host == "https://10.96.0.1:443"
