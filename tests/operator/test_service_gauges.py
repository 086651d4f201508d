"""Series of services: what their status says, nothing of who is gone, never more than the bound."""

from __future__ import annotations

import itertools
import math
import time
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from tandem.operator.cluster.store import Store
from tandem.operator.service_gauges import MAX_SERVICES, ServiceGauges
from tandem.protocol.names import LABEL_COMPONENT, LABEL_ROLE, LABEL_SERVICE

PREFIX = "tandem_operator:service_"
STATUS: dict[str, Any] = {
    "conditions": [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind, status, reason in (
            ("Servable", "False", "CanaryFailed"),
            ("ModelReady", "True", "ModelReady"),
            ("KVFabricReady", "Unknown", "LinksUnknown"),
        )
    ],
    "roles": [
        {
            "name": "decode",
            "revision": revision,
            "desired": desired,
            "ready": 1,
            "updated": 1,
            "draining": 0,
        }
        for revision, desired in (("old", 1), ("new", 2))
    ],
    "links": {"healthy": 3, "total": 4},
    "keys": {"generation": 2, "publishedAt": "1970-01-01T00:01:40Z"},
}


def item(name: str, labels: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """An object of the namespace ``ns``."""
    metadata = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"metadata": {**metadata, "labels": labels or {}}, **more}


def restarted(**counts: int) -> dict[str, Any]:
    """Status of a pod whose containers have ended so often; ``first`` is an init container."""
    found: dict[str, Any] = {"containerStatuses": [], "initContainerStatuses": []}
    for name, count in counts.items():
        field = "initContainerStatuses" if name == "first" else "containerStatuses"
        found[field].append({"name": name, "restartCount": count})
    return found


def reading(store: Store, most: int = MAX_SERVICES) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(ServiceGauges(store, most))
    return registry


def test_what_the_status_says_is_shown():
    """Conditions with reason, replicas over revisions, links, age of keys, restarts by role."""
    store = Store()
    store.put("LLMService", item("demo", status=STATUS))
    registry = reading(store)
    store.put("Pod", item("pod-0", {LABEL_SERVICE: "demo"}, status=restarted(main=3)))
    generate_latest(registry)
    for number in (1, 2):
        labels = {LABEL_SERVICE: "demo", LABEL_ROLE: "decode"}
        store.put("Pod", item(f"pod-{number}", labels, status=restarted(main=number, sidecar=1)))
    fetching = {LABEL_SERVICE: "demo", LABEL_COMPONENT: "model"}
    store.put("Pod", item("fetch", fetching, status=restarted(fetch=1)))

    def value(name: str, **labels: str) -> float | None:
        own = {"llmservice_namespace": "ns", "llmservice": "demo", **labels}
        return registry.get_sample_value(PREFIX + name, own)

    assert value("condition", type="Servable", reason="CanaryFailed") == 0
    assert value("condition", type="ModelReady", reason="ModelReady") == 1
    assert value("condition", type="KVFabricReady", reason="LinksUnknown") == -1
    assert value("replicas", role="decode", state="desired") == 3
    assert value("replicas", role="decode", state="ready") == 2
    assert value("links", state="healthy") == 3
    assert value("keys_published_timestamp_seconds") == 100
    assert value("restarts_total", role="decode") == 5
    assert value("restarts_total", role="model") == 1

    store.drop("LLMService", ("ns", "demo"), "uid-demo", "2")
    assert value("condition", type="ModelReady", reason="ModelReady") is None
    assert value("restarts_total", role="decode") is None


def test_series_are_bounded():
    """However many services there are, so many have series; the rest is a number."""
    store = Store()
    for number in range(10):
        store.put("LLMService", item(f"demo-{number}", status=STATUS))
    registry = reading(store, most=4)
    text = generate_latest(registry).decode()
    assert text.count("keys_published_timestamp_seconds{") == 4
    assert registry.get_sample_value("tandem_operator:services_not_shown") == 6


def test_restarts_only_grow():
    """Rollouts and scale-downs take pods away with all that happened to them: nothing begins anew,
    and what happens to others counts. What happened before the operator began does not."""
    store = Store()
    store.put("LLMService", item("demo", status=STATUS))
    registry, versions = reading(store), itertools.count(2)
    labels = {LABEL_SERVICE: "demo", LABEL_ROLE: "decode"}

    def put(name: str, *, created: float = math.inf, **counts: int) -> None:
        pod = item(name, labels, status=restarted(**counts))
        if created < math.inf:
            made = datetime.fromtimestamp(created, UTC)
            pod["metadata"]["creationTimestamp"] = f"{made:%Y-%m-%dT%H:%M:%SZ}"
        pod["metadata"]["resourceVersion"] = str(next(versions))
        store.put("Pod", pod)

    def total() -> float | None:
        own = {"llmservice_namespace": "ns", "llmservice": "demo", "role": "decode"}
        return registry.get_sample_value(PREFIX + "restarts_total", own)

    put("old-1", main=2)
    put("old-2", main=1)
    assert total() == 0
    put("old-1", main=4)
    put("old-2", main=2)
    assert total() == 3
    put("listed-later", created=time.time() - 3600, main=9)
    put("made-later", created=time.time() + 60, main=0)
    assert total() == 3
    store.drop("Pod", ("ns", "old-1"), "uid-old-1", str(next(versions)))
    assert total() == 3
    put("new", main=0, first=0)
    assert total() == 3
    put("new", main=1, first=2)
    assert total() == 6
    put("old-2", main=0)  # a kubelet that has forgotten
    assert total() == 6
    put("old-2", main=1)
    assert total() == 7
    put("listed-later", created=time.time() - 3600, main=10)
    put("made-later", created=time.time() + 60, main=1)
    assert total() == 9
