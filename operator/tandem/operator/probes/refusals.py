"""Reasons why routers are not ready, which their pods' status lacks.

They are refused keys, another wire, or the text of /ready.
"""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from threading import Lock

from tandem.operator.api.status import Reason
from tandem.operator.decide.observe import PodView, Problem
from tandem.operator.desired.naming import Role
from tandem.operator.probes.fleet import read_fleet
from tandem.protocol.names import ROUTER_PORT

Key = tuple[str, str]
TIMEOUT = 2.0
_EVERY = 10.0
_MOST = 8
_MOST_BYTES, _MOST_CHARACTERS = 2000, 300
_SILENT = Problem(Reason.STARTING, "")


class Refusals:
    """Reasons of routers; requests run in threads. Thread-safe."""

    def __init__(
        self, wake: Callable[[Key], None], workers: int = 2, port: int = ROUTER_PORT
    ) -> None:
        self._wake = wake
        self._port = port
        self._found: dict[Key, dict[str, Problem]] = {}
        self._asked: dict[Key, float] = {}
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="refusals")

    def known(self, key: Key, pods: Iterable[PodView], token: str) -> dict[str, Problem]:
        """Return known reasons by the pod's UID."""
        unready = [
            pod
            for pod in pods
            if pod.role is Role.ROUTER and pod.ip and not pod.ready and not pod.deleting
        ]
        now = time.monotonic()
        with self._lock:
            found = {pod.uid: self._found.get(key, {}).get(pod.uid, _SILENT) for pod in unready}
            due = unready and now - self._asked.get(key, float("-inf")) >= _EVERY
            if due:
                self._asked[key] = now
        if due:
            with contextlib.suppress(RuntimeError):  # closed
                self._pool.submit(self._ask, key, unready, token)
        return {uid: problem for uid, problem in found.items() if problem.message}

    def _ask(self, key: Key, pods: list[PodView], token: str) -> None:
        answers = {pod.uid: refusal_of(pod, token, self._port) for pod in pods}
        with self._lock:
            before = self._found.get(key, {})
            found = {
                uid: before.get(uid, _SILENT) if problem is None else problem
                for uid, problem in answers.items()
            }
            changed = before != found
            self._found[key] = found
        if changed:
            self._wake(key)

    def forget(self, key: Key) -> None:
        with self._lock:
            self._found.pop(key, None)
            self._asked.pop(key, None)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def refusal_of(pod: PodView, token: str, port: int) -> Problem | None:
    """Return why a router is not ready, with an empty message if it gives none.

    None if it does not answer: its last reason holds.
    """
    host = f"[{pod.ip}]" if ":" in (pod.ip or "") else pod.ip
    url = f"http://{host}:{port}"
    try:
        fleet = read_fleet(url, token, TIMEOUT)
    except (OSError, ValueError):
        return None
    refused, others = fleet.get("refused") or [], fleet.get("other_wires") or {}
    if refused:
        where = ", ".join(map(str, refused[:_MOST]))
        text = f"keys do not fit: it is refused by the workers at {where}"
        return Problem(Reason.KEYS_REFUSED, text)
    if others:
        listed = "; ".join(f"{where}: {text}" for where, text in sorted(others.items())[:_MOST])
        return Problem(Reason.WIRE_REFUSED, f"workers speak another protocol ({listed})")
    return Problem(Reason.STARTING, _not_ready_reason(url))


def _not_ready_reason(url: str) -> str:
    """Return the reason of ``/ready``, or ""."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as error:
        with contextlib.suppress(OSError, ValueError, AttributeError, HTTPException):
            return str(json.loads(error.read(_MOST_BYTES)).get("reason", ""))[:_MOST_CHARACTERS]
    except (OSError, HTTPException):
        pass
    return ""
