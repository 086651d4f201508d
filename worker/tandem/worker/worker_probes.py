"""Answers of the probes at each stage of a worker's life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from tandem.engine.core.engine_core import EngineCore
from tandem.worker.handoff import HandoffService
from tandem.worker.probes import ProbeServer, ProbeState
from tandem.worker.server_config import ServerConfig


@dataclass(slots=True)
class _Attached:
    core: EngineCore
    handoff: HandoffService
    draining: Callable[[], bool]


class WorkerProbes:
    """Probes of the worker while it loads and serves.

    A draining worker stays ready, as Kubernetes would delete unready pods first; so does a sleeping
    one, which can be woken.
    """

    def __init__(self, server: ServerConfig, registry: CollectorRegistry) -> None:
        self._attached: _Attached | None = None
        self._failed: str | None = None
        self._keys: Callable[[], list[str]] = list
        self._stepped = time.monotonic()
        self._main = threading.main_thread()
        state = ProbeState(self._health, self._ready, self._debug, registry)
        self._http = ProbeServer(server.host, server.probe_port, state)
        self._http.start()

    @property
    def port(self) -> int:
        return self._http.port

    def close(self) -> None:
        self._http.stop()

    def attach(
        self, *, core: EngineCore, handoff: HandoffService, draining: Callable[[], bool]
    ) -> None:
        self._attached = _Attached(core, handoff, draining)

    def tell_keys(self, names: Callable[[], list[str]]) -> None:
        """Set the function that names the known public keys."""
        self._keys = names

    def fail(self, reason: str) -> None:
        """Record a permanent failure of the engine."""
        self._failed = reason

    def note_step(self) -> None:
        self._stepped = time.monotonic()

    def _health(self) -> str | None:
        if self._failed is not None or not self._main.is_alive():
            return self._failed or "the step loop ended"
        # Not unhealthy: it may serve whole requests, and a drain comes first.
        return None if self._attached is None else self._attached.handoff.ended()

    def _ready(self) -> str | None:
        attached = self._attached
        if self._failed is not None or attached is None:
            return self._failed or "loading"
        return attached.handoff.problem()

    def _debug(self) -> dict[str, object]:
        attached = self._attached
        if attached is None:
            return {"state": "loading", "keys": self._keys()}
        return {
            "state": _state(attached),
            "keys": self._keys(),
            "seconds_since_step": round(time.monotonic() - self._stepped, 3),
            "transfer_progress": attached.handoff.progress(),
            "leased_blocks": attached.handoff.leased_blocks(),
            "peers": [
                {"peer": each.peer.hex(), "up": each.up, "reason": each.reason}
                for each in attached.handoff.peer_health()
            ],
        }


def _state(attached: _Attached) -> str:
    if attached.draining():
        return "draining"
    return "asleep" if attached.core.sleep.refuses else "serving"
