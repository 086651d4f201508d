"""What is listed and counted, over all namespaces that an operator serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import pytest
from tests.operator.builders import service
from tests.operator.harness import poll

from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.store import KINDS, SERVICE, Key, Store
from tandem.operator.loop.resync import Resync
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

SERVICES = {"full": ("a", "b"), "other": ("c",), "empty": ()}


class Lists:
    """Answers lists: services by namespace, and no children. What is ``refused`` (by namespace or
    by kind, with a status) is not listed."""

    def __init__(self) -> None:
        self.refused: dict[str, int] = {}
        self.last: tuple[str, str] | None = None
        """With this list its namespace is gone."""
        self.asked: list[tuple[str, str]] = []
        self.then: Callable[[str, str], None] = lambda *_: None
        """Called behind each list."""

    def page(self, kind: str, namespace: str, **_: object) -> dict[str, Any]:
        try:
            return self._page(kind, namespace)
        finally:
            self.then(kind, namespace)

    def _page(self, kind: str, namespace: str) -> dict[str, Any]:
        self.asked.append((kind, namespace))
        if (kind, namespace) == self.last:
            self.refused[namespace] = 403
        status = self.refused.get(namespace) or self.refused.get(kind)
        if status is not None:
            raise ClusterError(status, "Forbidden", "not yours")
        names = SERVICES[namespace] if kind == "LLMService" else ()
        items = [service(name) for name in names]
        for item in items:
            uid = f"{namespace}-{item['metadata']['name']}"
            item["metadata"] |= {"namespace": namespace, "uid": uid, "resourceVersion": "1"}
        return {"items": items, "metadata": {"resourceVersion": "1"}}


@contextmanager
def listing(lists: Lists, store: Store, wake: Callable[..., None], seconds: float = 60.0):
    settings = OperatorSettings(namespaces=tuple(SERVICES), resync_seconds=seconds)
    metrics = OperatorMetrics()
    resync = Resync(cast(Cluster, lists), store, settings, wake, metrics)
    name = "tandem_operator:services"
    assert metrics.registry.get_sample_value(name) == -1, "none was listed yet"
    stop = threading.Event()
    thread = threading.Thread(target=resync.run, args=(stop,))
    thread.start()
    try:
        yield resync, lambda: metrics.registry.get_sample_value(name)
    finally:
        stop.set()
        thread.join(20)


def test_services_of_all_namespaces_are_counted() -> None:
    """Not those of the namespace that was listed last, which may be an empty one."""
    with listing(Lists(), Store(), lambda *_: None) as (resync, counted):
        assert resync.filled.wait(20)
        assert counted() == 3
        assert resync.served() == tuple(SERVICES)


@pytest.mark.parametrize("status", [403, 404])
def test_a_namespace_that_is_gone_holds_up_no_other(status: int) -> None:
    """It counts as seen, and its lists, which never come, make nobody dead."""
    lists = Lists()
    lists.refused["full"] = status
    began = time.monotonic()
    with listing(lists, Store(), lambda *_: None, 0.2) as (resync, counted):
        assert resync.filled.wait(20)
        assert counted() == 1
        assert resync.served() == ("other", "empty")
        seen = len(lists.asked)
        assert poll(lambda: len(lists.asked) > seen + 3 * len(KINDS)) is not None
        later = lists.asked[seen:]
        assert {kind for kind, namespace in later if namespace == "full"} == {SERVICE}
        assert poll(lambda: resync.age() < (time.monotonic() - began) / 2) is not None


def test_a_namespace_is_found_gone_by_any_of_its_lists() -> None:
    """Not a period later: a refused watch ends all others before that. Nor by one refusal."""
    lists = Lists()
    lists.last = ("Pod", "full")
    with listing(lists, Store(), lambda *_: None, 6000.0) as (resync, _):
        assert resync.filled.wait(20)
        assert resync.served() == ("other", "empty")
    assert lists.asked.count(("Pod", "full")) == 2


@pytest.mark.parametrize("what", ["full", SERVICE, "Pod"])
def test_one_refusal_leaves_nobody_out(what: str) -> None:
    """Of all of a namespace, of services, of another kind: it is asked once more before that."""
    lists, left_out = Lists(), []
    lists.refused[what] = 403

    def relent(kind: str, namespace: str) -> None:
        if (kind, namespace) == (KINDS[-1], tuple(SERVICES)[-1]):
            lists.refused.clear()  # everything was asked once

    lists.then = relent
    with listing(lists, Store(), lambda *_: None, 6000.0) as (resync, counted):
        began = time.monotonic()
        while not resync.filled.wait(0.01):
            assert time.monotonic() - began < 20
            left_out += [each for each in SERVICES if each not in resync.served()]
        assert resync.served() == tuple(SERVICES)
        assert counted() == 3
    assert left_out == []


@pytest.mark.full
def test_who_is_left_out_is_asked_again_soon() -> None:
    lists = Lists()
    lists.refused["full"] = 403
    with listing(lists, Store(), lambda *_: None, 6000.0) as (resync, counted):
        assert resync.filled.wait(20)
        assert resync.served() == ("other", "empty")
        lists.refused.clear()
        assert poll(lambda: resync.served() == tuple(SERVICES)) is not None
        assert poll(lambda: counted() == 3) is not None


def test_a_namespace_that_is_there_again_is_looked_at_when_all_of_it_was_listed() -> None:
    """Its services are woken behind its children, and not as long as a kind is refused."""
    lists, woken = Lists(), []
    lists.refused["other"] = 403

    def wake(key: Key, *_: float) -> None:
        woken.append((key, len(lists.asked)))

    with listing(lists, Store(), wake, 0.2) as (resync, counted):
        assert resync.filled.wait(20)
        lists.refused = {"Secret": 403}
        assert poll(lambda: ("Secret", "other") in lists.asked) is not None
        assert "other" not in resync.served()
        lists.refused = {}
        assert poll(lambda: "other" in resync.served()) is not None
        assert poll(lambda: counted() == 3) is not None
    at = min(number for key, number in woken if key == ("other", "c"))
    listed = {kind for kind, namespace in lists.asked[:at] if namespace == "other"}
    assert listed == set(KINDS)


def test_a_kind_that_may_not_be_listed_is_waited_for() -> None:
    """Where services may be listed and their Secrets may not, nobody looks at half of what is
    there."""
    lists = Lists()
    lists.refused["Secret"] = 403
    with listing(lists, Store(), lambda *_: None) as (resync, _):
        assert poll(lambda: lists.asked.count(("Secret", "full")) > 1) is not None
        assert not resync.filled.is_set()
        assert resync.served() == tuple(SERVICES)
