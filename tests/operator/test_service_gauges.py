"""Series of services: what their status says, nothing of who is gone, never more than the bound."""

from __future__ import annotations

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


def reading(store: Store, most: int = MAX_SERVICES) -> CollectorRegistry:
    """A registry with the store's series."""
    registry = CollectorRegistry()
    registry.register(ServiceGauges(store, most))
    return registry


def test_what_the_status_says_is_shown():
    """Conditions with reason, replicas over revisions, links, age of keys, restarts by role."""
    store = Store()
    store.put("LLMService", item("demo", status=STATUS))
    for number in (1, 2):
        labels = {LABEL_SERVICE: "demo", LABEL_ROLE: "decode"}
        status = {"containerStatuses": [{"restartCount": number}, {"restartCount": 1}]}
        store.put("Pod", item(f"pod-{number}", labels, status=status))
    fetching = {LABEL_SERVICE: "demo", LABEL_COMPONENT: "model"}
    ended = {"containerStatuses": [{"restartCount": 1}]}
    store.put("Pod", item("fetch", fetching, status=ended))
    registry = reading(store)

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
