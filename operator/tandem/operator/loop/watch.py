"""Watch streams by kopf. Every event is stored, and wakes its service.

Only ``on.event``: no finalizer, annotation or state of kopf's on any object.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kopf

from tandem.operator.api.values import GROUP, VERSION
from tandem.operator.cluster import KINDS
from tandem.operator.cluster.store import Store
from tandem.operator.metrics import OperatorMetrics
from tandem.operator.settings import OperatorSettings
from tandem.protocol.names import LABEL_SERVICE

CHILDREN = (
    ("apps", "v1", "deployments"),
    ("apps", "v1", "controllerrevisions"),
    ("batch", "v1", "jobs"),
    ("networking.k8s.io", "v1", "networkpolicies"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io", "v1", "roles"),
    ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    ("", "v1", "configmaps"),
    ("", "v1", "pods"),
    ("", "v1", "secrets"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "services"),
    (GROUP, VERSION, "llmrolescalers"),
)
"""Group, version and plural of every kind of child."""
_KINDS = {plural: kind for kind, (_, plural) in KINDS.items()}

_STOP_SECONDS = 0.2
_CLOSE_SECONDS = 0.25
_LOGIN_SECONDS = 1.0
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WatchEvents:
    """Receivers of events."""

    service: Callable[[Key], None]
    """Called after a service changed."""
    child: Callable[..., None]
    """Called after a child changed: its key, the object, ``deleted``."""
    store: Store
    metrics: OperatorMetrics


def _log_in(**given: Any) -> kopf.ConnectionInfo | None:
    """Log in by the pod's account, else by a kubeconfig."""
    found = service_account() or kopf.login_with_kubeconfig(**given)
    return found or kopf.login_via_client(**given)


def service_account(
    folder: Path = _ACCOUNT, environ: Mapping[str, str] = os.environ
) -> kopf.ConnectionInfo | None:
    """Return the pod's account, or None outside of pods.

    It has the API server's address: kopf's own login requires DNS. Called again when a token has
    expired.
    """
    try:
        token = (folder / "token").read_text().strip()
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    except (OSError, KeyError):
        return None
    return kopf.ConnectionInfo(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_path=str(folder / "ca.crt"),
        token=token,
    )


def registry_of(events: WatchEvents) -> kopf.OperatorRegistry:
    """Return handlers that pass events on."""
    registry = kopf.OperatorRegistry()
    # kopf's default after a failed login is a minute without watches
    kopf.on.login(registry=registry, id="login", backoff=_LOGIN_SECONDS)(_log_in)

    async def on_service(namespace: str | None, name: str | None, event: Any, **_: Any) -> None:
        events.metrics.events.labels("llmservices").inc()
        if namespace and name and _is_news(events.store, "LLMService", event):
            events.service((namespace, name))

    kopf.on.event(GROUP, VERSION, "llmservices", registry=registry, id="service")(on_service)
    for group, version, plural in CHILDREN:
        handler = _child_handler(plural, events)
        kopf.on.event(
            group,
            version,
            plural,
            registry=registry,
            id=plural,
            labels={LABEL_SERVICE: kopf.PRESENT},
        )(handler)
    return registry


def _child_handler(plural: str, events: WatchEvents) -> Any:
    async def on_child(namespace: str | None, labels: Any, event: Any, **_: Any) -> None:
        events.metrics.events.labels(plural).inc()
        service = labels.get(LABEL_SERVICE)
        if namespace and service:
            if not _is_news(events.store, _KINDS[plural], event):
                return  # written by us, or known from a list
            key, gone = (namespace, service), event["type"] == "DELETED"
            events.child(key, {"kind": _KINDS[plural], **event["object"]}, deleted=gone)

    return on_child


def _is_news(store: Store, kind: str, event: Any) -> bool:
    """Store the object of an event; return whether it was new."""
    item = event["object"]
    metadata = item["metadata"]
    if event["type"] == "DELETED":
        place = metadata["namespace"], metadata["name"]
        return store.drop(kind, place, metadata["uid"], metadata["resourceVersion"]) is not None
    return store.put(kind, item) is not None


def settings_of() -> kopf.OperatorSettings:
    """Return kopf's settings: short timeouts, no posted events, no scan."""
    settings = kopf.OperatorSettings()
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.server_timeout = 120
    settings.watching.client_timeout = 150
    settings.watching.inactivity_timeout = 70
    settings.networking.request_timeout = 10
    settings.networking.connect_timeout = 4
    for kind in CHILDREN:
        settings.watching.label_selectors[kind] = LABEL_SERVICE
    return settings


def run(
    settings: OperatorSettings,
    events: WatchEvents,
    stop: threading.Event,
    served: Callable[[], tuple[str, ...]],
) -> None:
    """Watch the namespaces of ``served`` until ``stop`` or a signal. Raises kopf's errors."""
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else a line per event
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)  # signals are ours
    asyncio.run(_run(settings, events, stop, served))


async def _run(
    settings: OperatorSettings,
    events: WatchEvents,
    stop: threading.Event,
    served: Callable[[], tuple[str, ...]],
) -> None:
    while not stop.is_set():
        # kopf would wait for a threading.Event in a thread that outlives a failure.
        flag = asyncio.Event()
        namespaces = served()
        asking = asyncio.create_task(_forward(stop, partial(_is_now, served, namespaces), flag))
        try:
            if settings.namespaces and not namespaces:
                await flag.wait()
                continue
            await kopf.operator(
                registry=registry_of(events),
                settings=settings_of(),
                standalone=True,
                clusterwide=not settings.namespaces,
                namespaces=list(namespaces),
                stop_flag=flag,
            )
            if not flag.is_set():
                return
        finally:
            asking.cancel()
            await asyncio.sleep(_CLOSE_SECONDS)  # aiohttp's TLS connections close after it


def _is_now(served: Callable[[], tuple[str, ...]], namespaces: tuple[str, ...]) -> bool:
    return served() == namespaces


async def _forward(stop: threading.Event, same: Callable[[], bool], flag: asyncio.Event) -> None:
    """Set ``flag`` after ``stop``, or when other namespaces are to be watched."""
    while not stop.is_set() and same():  # noqa: ASYNC110  threads' words, not this loop's
        await asyncio.sleep(_STOP_SECONDS)
    flag.set()
