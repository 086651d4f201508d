"""CURVE on the sockets of links: the keys that may connect, and the keys of outgoing connections.

The process's ZMQ context has one authenticator. Keys are read again when their folder changes.
"""

from __future__ import annotations

import logging
import time

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.keys import CallKeys, KeyRing

logger = logging.getLogger(__name__)

START_SECONDS = 5.0


class CurveGuard:
    """CURVE guard of the process. Call ``start`` before the first bind, ``stop`` after the last."""

    def __init__(self, ring: KeyRing) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._ring = ring
        self._authenticator = ThreadAuthenticator(self.context)

    def start(self) -> None:
        """Start the authenticator. Raises zmq.ZMQError if the process has another guard."""
        ends = time.monotonic() + START_SECONDS
        while True:
            try:
                self._authenticator.start()
            except zmq.ZMQError as error:
                self._authenticator.zap_socket.close(0)
                # The address of a closed socket becomes free a moment later.
                if error.errno != zmq.EADDRINUSE or time.monotonic() > ends:
                    raise
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        self._authenticator.stop()

    def serve(self, socket: zmq.Socket[bytes], role: str, *others: str) -> None:
        """Prepare a socket before ``bind``: only keys of these roles may connect."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._ring.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, role.encode())
        self._authenticator.configure_curve_callback(role, _OnlyRoles(self._ring, role, *others))

    def call(self, socket: zmq.Socket[bytes], role: str, *others: str, attempt: int) -> None:
        """Prepare a socket before ``connect``: expect a server of ``role``.

        ``attempt`` selects one of the keys of these roles. Raises InvalidParameter if there is
        none.
        """
        keys = self._ring.call((role, *others), attempt)
        if keys is None:
            raise InvalidParameter("curve_peers", role, "a folder with a public key of that role")
        call_with(keys, socket)


def call_with(keys: CallKeys, socket: zmq.Socket[bytes]) -> None:
    """Set the keys of both ends on a socket, before ``connect``."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class _OnlyRoles:
    """Check of a caller's key, for each new connection, in the authenticator's thread."""

    def __init__(self, ring: KeyRing, *roles: str) -> None:
        self._ring = ring
        self._roles = roles

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the key (32 bytes or Z85) belongs to one of the roles."""
        text, named = key if len(key) != 32 else z85.encode(key), " or ".join(self._roles)
        try:
            known = any(self._ring.knows(role, text) for role in self._roles)
        except InvalidParameter:
            logger.exception("keys of %s cannot be read; no new caller is accepted", named)
            return False
        if not known:
            logger.warning("a caller without a key of a %s was turned away", named)
        return known
