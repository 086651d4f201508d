"""Leader election over one Lease, in a thread with a client of its own.

Outside kopf's loop on purpose: a busy or stuck loop must not lose the Lease, and a leader that
cannot renew must end before another begins. Semantics as client-go's leaderelection; the holder's
clock is never compared with ours: what counts is how long the Lease looked unchanged from here.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable

from tandem.operator.clock import micro_time_text
from tandem.operator.cluster import Cluster, ClusterError
from tandem.operator.desired.naming import Manifest
from tandem.operator.settings import OperatorSettings

logger = logging.getLogger(__name__)

EXIT_LOST = 3
"""Exit status of a leader that could not renew."""


class Leader:
    """``start``, wait for ``acquired``; ``release`` at the end."""

    def __init__(
        self,
        cluster: Cluster,
        settings: OperatorSettings,
        *,
        lost: Callable[[], None] = lambda: os._exit(EXIT_LOST),
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._lost = lost
        name = settings.identity or os.environ.get("TANDEM_POD_NAME") or os.uname().nodename
        self.identity = f"{name}_{secrets.token_hex(4)}"
        self.acquired = threading.Event()
        self._stop = threading.Event()
        self._seen: tuple[str, float] | None = None
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def start(self) -> None:
        """Try for the Lease from now on."""
        self._thread.start()

    def release(self) -> None:
        """Give the Lease back, so that another takes over at once."""
        self._stop.set()
        self._thread.join(timeout=self._settings.retry_seconds + 10)
        if not self.acquired.is_set():
            return
        try:
            lease = self._read()
            if lease is not None and _spec_of(lease).get("holderIdentity") == self.identity:
                free = {"holderIdentity": "", "leaseDurationSeconds": 1}
                self._cluster.replace({**lease, "spec": _spec_of(lease) | free})
        except ClusterError as error:
            logger.warning("the Lease was not given back: %s", error)

    def _run(self) -> None:
        renewed = time.monotonic()
        while not self._stop.is_set():
            if self._try_safely():
                renewed = time.monotonic()
                if not self.acquired.is_set():
                    logger.info("leading as %s", self.identity)
                    self.acquired.set()
            elif self.acquired.is_set() and (
                time.monotonic() - renewed > self._settings.renew_deadline
            ):
                logger.error("the Lease could not be renewed: ending")
                self._lost()
                return
            self._stop.wait(self._settings.retry_seconds)

    def alive(self) -> bool:
        """Whether the election goes on."""
        return self._thread.is_alive()

    def _try_safely(self) -> bool:
        """Whatever goes wrong costs one try: a leader whose thread died would lead for ever."""
        try:
            return self._try()
        except Exception:
            logger.exception("the Lease: unexpected")
            return False

    def _try(self) -> bool:
        """Take or renew; whether we hold the Lease now."""
        try:
            lease = self._read()
            if lease is None:
                return self._cluster.create(self._made()) is not None
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

    def _is_free(self, lease: Manifest) -> bool:
        """Ours, given back, or unchanged for as long as it lasts."""
        holder = _spec_of(lease).get("holderIdentity") or ""
        if self.acquired.is_set() and holder != self.identity:
            return False  # somebody took it: never take it back while still working
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


def _spec_of(lease: Manifest) -> Manifest:
    """Empty in a Lease that somebody else made."""
    spec: Manifest = lease.get("spec") or {}
    return spec
