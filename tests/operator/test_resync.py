"""What is counted of lists, over all namespaces that an operator serves."""

from __future__ import annotations

import threading
from typing import Any, cast

from tests.operator.builders import service

from tandem.operator.cluster import Cluster
from tandem.operator.cluster.store import Store
from tandem.operator.loop.resync import Resync
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings

SERVICES = {"full": ("a", "b"), "other": ("c",), "empty": ()}


class Lists:
    """Answers lists: services by namespace, and no children."""

    def page(self, kind: str, namespace: str, **_: object) -> dict[str, Any]:
        """One page of one kind."""
        names = SERVICES[namespace] if kind == "LLMService" else ()
        items = [service(name) for name in names]
        for item in items:
            uid = f"{namespace}-{item['metadata']['name']}"
            item["metadata"] |= {"namespace": namespace, "uid": uid, "resourceVersion": "1"}
        return {"items": items, "metadata": {"resourceVersion": "1"}}


def test_services_of_all_namespaces_are_counted() -> None:
    """Not those of the namespace that was listed last, which may be an empty one."""
    metrics = OperatorMetrics()
    settings = OperatorSettings(namespaces=tuple(SERVICES))
    resync = Resync(cast(Cluster, Lists()), Store(), settings, lambda *_: None, metrics)
    name = "tandem_operator:services"
    assert metrics.registry.get_sample_value(name) == -1, "none was listed yet"
    stop = threading.Event()
    listing = threading.Thread(target=resync.run, args=(stop,))
    listing.start()
    try:
        assert resync.filled.wait(20)
        assert metrics.registry.get_sample_value(name) == 3
    finally:
        stop.set()
        listing.join(20)
