"""Which routers and workers do not know each other's keys: asked of routers that are not ready.

A router that no worker lets in is alive and never ready, and its pod's status says no more than
that. Fed by ``reconcile``; asks in threads of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from tandem.operator.decide.observe import PodView
from tandem.operator.desired.naming import Role
from tandem.operator.probes.fleet import read_fleet
from tandem.protocol.names import ROUTER_PORT

Key = tuple[str, str]
TIMEOUT = 2.0
_EVERY = 10.0


class Refusals:
    """Answers from memory; asks beside. Thread-safe."""

    def __init__(
        self, wake: Callable[[Key], None], workers: int = 2, port: int = ROUTER_PORT
    ) -> None:
        self._wake = wake
        self._port = port
        self._found: dict[Key, dict[str, str]] = {}
        self._asked: dict[Key, float] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="refusals")

    def known(self, key: Key, pods: Iterable[PodView], token: str) -> dict[str, str]:
        """What is the matter with keys, by the pod's UID; asks routers that are not ready."""
        unready = [
            pod
            for pod in pods
            if pod.role is Role.ROUTER and pod.ip and not pod.ready and not pod.deleting
        ]
        now = time.monotonic()
        with self._lock:
            found = {pod.uid: self._found.get(key, {}).get(pod.uid, "") for pod in unready}
            due = unready and now - self._asked.get(key, float("-inf")) >= _EVERY
            if due:
                self._asked[key] = now
        if due:
            with contextlib.suppress(RuntimeError):  # closed
                self._pool.submit(self._ask, key, unready, token)
        return {uid: said for uid, said in found.items() if said}

    def _ask(self, key: Key, pods: list[PodView], token: str) -> None:
        answers = {pod.uid: refusal_of(pod, token, self._port) for pod in pods}
        with self._lock:
            before = self._found.get(key, {})
            found = {
                uid: before.get(uid, "") if said is None else said for uid, said in answers.items()
            }
            changed = before != found
            self._found[key] = found
        if changed:
            self._wake(key)

    def forget(self, key: Key) -> None:
        """The service is gone."""
        with self._lock:
            self._found.pop(key, None)
            self._asked.pop(key, None)

    def close(self) -> None:
        """Ask nobody any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def refusal_of(pod: PodView, token: str, port: int) -> str | None:
    """What a router says of workers that refuse its key, empty where none does; None when it does
    not answer, which says nothing: what it said last still holds."""
    host = f"[{pod.ip}]" if ":" in (pod.ip or "") else pod.ip
    try:
        refused = read_fleet(f"http://{host}:{port}", token, TIMEOUT).get("refused") or []
    except (OSError, ValueError):
        return None
    where = ", ".join(map(str, refused[:8]))
    return f"keys do not fit: it is refused by the workers at {where}" if refused else ""
