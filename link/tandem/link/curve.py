"""CURVE on the sockets of links: who may call, and with which keys one calls others.

One authenticator for the process's ZMQ context; both the I/O thread (routers call) and the
hand-off's control thread (decode workers call) open their sockets in that context. Keys are read
anew when their folder changes, so a rotation needs no restart of those who only listen.
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
    """``start`` before the first socket is bound, ``stop`` after the last is closed."""

    def __init__(self, ring: KeyRing) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._ring = ring
        self._authenticator = ThreadAuthenticator(self.context)

    def start(self) -> None:
        """Begin to answer ZMQ's questions about callers. Raises zmq.ZMQError where another
        guard of this process still does."""
        ends = time.monotonic() + START_SECONDS
        while True:
            try:
                self._authenticator.start()
            except zmq.ZMQError as error:
                self._authenticator.zap_socket.close(0)
                # A closed socket lets go of its address in its own time.
                if error.errno != zmq.EADDRINUSE or time.monotonic() > ends:
                    raise
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        """Stop answering."""
        self._authenticator.stop()

    def serve(self, socket: zmq.Socket[bytes], role: str, *others: str) -> None:
        """Before ``bind``: only callers with a key of ``role``, or one of ``others``, get
        through."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._ring.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, role.encode())
        self._authenticator.configure_curve_callback(role, _OnlyRoles(self._ring, role, *others))

    def call(self, socket: zmq.Socket[bytes], role: str, *others: str, attempt: int) -> None:
        """Before ``connect``: expect a server of ``role``; ``attempt`` goes through its keys, then
        through those of ``others``.

        Raises InvalidParameter when no key of those roles is known.
        """
        keys = self._ring.call((role, *others), attempt)
        if keys is None:
            raise InvalidParameter("curve_peers", role, "a folder with a public key of that role")
        call_with(keys, socket)


def call_with(keys: CallKeys, socket: zmq.Socket[bytes]) -> None:
    """Before ``connect``: who answers must have the one key, and is shown the other."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class _OnlyRoles:
    """Asked in the authenticator's thread for every new connection."""

    def __init__(self, ring: KeyRing, *roles: str) -> None:
        self._ring = ring
        self._roles = roles

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the caller's key (32 bytes or Z85) is one of the roles'."""
        text, named = key if len(key) != 32 else z85.encode(key), " or ".join(self._roles)
        try:
            known = any(self._ring.knows(role, text) for role in self._roles)
        except InvalidParameter:
            logger.exception("keys of %s cannot be read; nobody new is let in", named)
            return False
        if not known:
            logger.warning("a caller without a key of a %s was turned away", named)
        return known
