"""Leader election over one Lease, in a thread with its own client.

Outside kopf's loop, which may be busy; a watchdog ends a leader that cannot renew. Semantics as
client-go's leaderelection: only the local clock counts.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from tandem.operator.clock import micro_time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.cluster.fence import Fence
from tandem.operator.desired.naming import Manifest
from tandem.operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

EXIT_LOST = 3
"""Exit status of a leader that could not renew."""


def end_process() -> None:
    """Log the stack of every thread, and end at once."""
    logger.error("the Lease could not be renewed: ending")
    faulthandler.dump_traceback()
    os._exit(EXIT_LOST)


class Watchdog:
    """Calls ``lost`` once if ``feed`` is not called in time."""

    def __init__(self, lost: Callable[[], None], *, by_force_after: float | None) -> None:
        """``by_force_after``: seconds after the deadline until the process ends without
        ``lost``.
        """
        self._lost = lost
        self._by_force_after = by_force_after
        self._deadline: float | None = None
        self._stopped = False
        self._changed = threading.Condition()
        self._silent = None if by_force_after is None else open(os.devnull, "w")  # noqa: SIM115
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def feed(self, deadline: float) -> None:
        """Set the deadline on the monotonic clock."""
        with self._changed:
            if self._stopped:
                return
            self._deadline = deadline
            self._changed.notify()
            if self._by_force_after is not None and self._silent is not None:
                left = max(0.001, deadline - time.monotonic() + self._by_force_after)
                faulthandler.dump_traceback_later(left, exit=True, file=self._silent)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._deadline = None
            self._changed.notify()
            if self._silent is not None:
                faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._is_over():
            if self._stopped:
                return
        self._lost()

    def _is_over(self) -> bool:
        """Wait for a change or the deadline; return whether it has passed."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait()
                return False
            left = self._deadline - time.monotonic()
            if left > 0:
                self._changed.wait(left)
                return False
            self._deadline = None
            return True


LONGEST_CALL = 0.5
"""Maximum share of the renew deadline for a call about the Lease."""
_HANGS = 6
"""Retry periods of one attempt after which the election counts as stuck."""


class Leader:
    """Election of one replica: ``start``, wait for ``acquired``, and ``release``."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        *,
        fence: Fence | None = None,
        lost: Callable[[], None] = end_process,
    ) -> None:
        """``fence`` is open while the Lease holds; ``lost`` is called at the deadline, by the
        watchdog.
        """
        self._cluster = cluster
        self._settings = settings
        self._fence = fence or Fence()
        by_force = (settings.lease_seconds - settings.renew_deadline) / 2
        self._watchdog = Watchdog(lost, by_force_after=by_force if lost is end_process else None)
        name = os.environ.get("TANDEM_POD_NAME") or os.uname().nodename
        self.identity = f"{name}_{secrets.token_hex(4)}"
        self.acquired = threading.Event()
        self._stop = threading.Event()
        self._seen: tuple[str, float] | None = None
        self._absent: float | None = None
        """Time since which there has been no Lease."""
        self._round = time.monotonic()
        self._lost = lost
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def release(self) -> None:
        """Release the Lease for another replica, unless a write is in progress."""
        ended = self._fence.close(self._settings.retry_seconds)
        self._stop.set()
        self._thread.join(timeout=self._settings.renew_deadline * LONGEST_CALL)
        if self.acquired.is_set() and not self._thread.is_alive():
            self._give_back(ended)
        self._watchdog.stop()

    def _give_back(self, ended: bool) -> None:
        if not ended:
            logger.warning("a write is still in progress: the Lease will expire")
            return
        try:
            lease = self._read()
            if lease is not None and _holder(lease) == self.identity:
                free = {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._cluster.replace({**lease, "spec": _spec_of(lease) | free})
        except ClusterError as error:
            logger.warning("the Lease was not given back: %s", error)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = self._round = time.monotonic()
            if self._try_safely():
                self._renewed(began + self._settings.renew_deadline)
            self._stop.wait(self._settings.retry_seconds)

    def _renewed(self, deadline: float) -> None:
        """Record that the Lease is ours; other replicas may take it after ``deadline``."""
        if not self.acquired.is_set() and time.monotonic() > deadline:
            return  # it may have expired: renew first
        self._fence.open_until(deadline)
        self._watchdog.feed(deadline)
        if not self.acquired.is_set():
            logger.info("leading as %s", self.identity)
            self.acquired.set()

    def alive(self) -> bool:
        """Return whether the election continues; a hanging attempt has ended it."""
        longest = self._settings.lease_seconds + _HANGS * self._settings.retry_seconds
        return self._thread.is_alive() and time.monotonic() - self._round < longest

    def _try_safely(self) -> bool:
        """Try, and catch every error: the thread must not end."""
        try:
            return self._try()
        except Exception:
            logger.exception("the Lease: unexpected")
            return False

    def _try(self) -> bool:
        """Take or renew the Lease; return whether it is ours."""
        try:
            lease = self._read()
            if self.acquired.is_set() and _holder(lease) != self.identity:
                self._end("the Lease is another's, or gone")
                return False
            if lease is None:
                return self._may_make() and self._cluster.create(self._made()) is not None
            if not self._is_free(lease):
                return False
            self._cluster.replace(self._taken(lease))
        except ClusterError as error:
            if error.status != 409:
                logger.warning("the Lease: %s", error)
            return False
        return True

    def _read(self) -> Manifest | None:
        return self._cluster.get("Lease", self._settings.own_namespace, self._settings.lease_name)

    def _end(self, why: str) -> None:
        if self._stop.is_set():
            return
        logger.error("%s: ending", why)
        self._stop.set()
        self._fence.close(0.0)
        self._watchdog.stop()
        self._lost()

    def _may_make(self) -> bool:
        """Return whether a Lease may be made.

        After a deletion its leader must have time to detect it.
        """
        if self._absent is None:
            logger.info(
                "the Lease does not exist; creating it in %.0f s", self._settings.lease_seconds
            )
            self._absent = time.monotonic()
        return time.monotonic() - self._absent > self._settings.lease_seconds

    def _is_free(self, lease: Manifest) -> bool:
        """Return whether the Lease is ours, released, never held, or expired."""
        self._absent = None
        holder = _holder(lease)
        version, now = lease["metadata"]["resourceVersion"], time.monotonic()
        if self._seen is None or self._seen[0] != version:
            self._seen = (version, now)
        if holder in ("", self.identity):
            return True
        lasts = _spec_of(lease).get("leaseDurationSeconds") or self._settings.lease_seconds
        return now - self._seen[1] > lasts

    def _made(self) -> Manifest:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": self._settings.lease_name,
                "namespace": self._settings.own_namespace,
            },
            "spec": self._spec({}),
        }

    def _taken(self, lease: Manifest) -> Manifest:
        return {**lease, "apiVersion": "coordination.k8s.io/v1", "kind": "Lease"} | {
            "spec": self._spec(_spec_of(lease))
        }

    def _spec(self, before: Manifest) -> Manifest:
        now = micro_time_text(time.time())
        ours = before.get("holderIdentity") == self.identity
        changes = int(before.get("leaseTransitions") or 0)
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": max(1, round(self._settings.lease_seconds)),
            "acquireTime": before.get("acquireTime", now) if ours else now,
            "renewTime": now,
            "leaseTransitions": changes if ours or not before else changes + 1,
        }


def _holder(lease: Manifest | None) -> str:
    """Return the holder of the Lease, or ""."""
    return "" if lease is None else _spec_of(lease).get("holderIdentity") or ""


def _spec_of(lease: Manifest) -> Manifest:
    spec: Manifest = lease.get("spec") or {}
    return spec
