"""The answering end of many links: it greets callers, reads frames and detects silent peers.

It does no input or output: the ``Host`` has the socket and the users of the links.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from tandem.link.session import Session, Terms, Verdict
from tandem.link.sockets import MAX_LINKS
from tandem.protocol.errors import WireError
from tandem.protocol.ids import NO_INCARNATION, Incarnation
from tandem.protocol.link import Header, read_header, write_header
from tandem.protocol.messages import Hello, Reset, Welcome, encode

FrameIn = tuple[bytes, Header, Any]
"""Identity of the connection, header, message."""
LONGEST_REASON = 500


class Link:
    """Connection of one caller."""

    __slots__ = ("identity", "number", "session")

    def __init__(self, identity: bytes, number: int, session: Session) -> None:
        self.identity = identity
        self.number = number
        """Number of the link, unique in its listener."""
        self.session = session

    @property
    def peer(self) -> Incarnation:
        return self.session.peer


class Host(Protocol):
    """Owner of the socket and user of the links. Its methods never block."""

    def write(self, parts: list[bytes]) -> bool:
        """Write identity, header and payload to the socket; return False if they cannot be sent."""
        ...

    def welcome(self, hello: Hello) -> Welcome[Any] | str:
        """Return the WELCOME for a caller that passed the checks, or the reason of a refusal."""
        ...

    def up(self, link: Link, welcome: Welcome[Any]) -> None:
        """The link is up; its WELCOME is sent next."""
        ...

    def deliver(self, link: Link, message: Any) -> bool:
        """Deliver a message; return False if the user cannot keep up."""
        ...

    def down(self, link: Link, reason: str) -> None:
        """The link has ended. Follows ``up``, once."""
        ...

    def dropped(self, kind: str, words: str) -> None:
        """Count a dropped frame: ``garbage``, ``stray``, ``refused`` (HELLO) or ``reset``."""
        ...


class Listener:
    """Links of one socket. Only ``read`` may be called from any thread."""

    def __init__(self, terms: Terms, decode: Callable[[bytes], Any], host: Host) -> None:
        self.by_peer: dict[Incarnation, Link] = {}
        self._terms = terms
        self._decode = decode
        self._host = host
        self._write = host.write
        self._by_identity: dict[bytes, Link] = {}
        self._numbers = itertools.count(1)

    def read(self, parts: list[bytes]) -> FrameIn | None:
        """Return a frame that the socket received; count garbage and return None."""
        try:
            if len(parts) != 3:
                raise WireError(f"message of {len(parts)} parts; it has 3")
            identity, head, payload = parts
            return identity, read_header(head), self._decode(payload)
        except WireError as error:
            self._host.dropped("garbage", str(error))
            return None

    def take(self, frame: FrameIn, now: float) -> None:
        identity, header, message = frame
        link = self._by_identity.get(identity)
        if type(message) is Hello and header.sequence == 0:
            self._greeted(identity, header, message, now)
            return
        if link is None:
            self._refuse(identity, header, "reset", "no such link")
            return
        verdict = link.session.take(header, message, now)
        if verdict is Verdict.DELIVER:
            if not self._host.deliver(link, message):
                self.drop(link, "it sends more than is accepted")
        elif verdict is Verdict.STRAY:
            self._host.dropped("stray", type(message).__name__)
        elif verdict is not Verdict.NOTED:
            self._end(link, link.session.why, notify=verdict is Verdict.BROKEN)

    def send_message(self, link: Link, payload: bytes) -> None:
        """Send a message; if that fails, the link has ended."""
        if not self._write([link.identity, link.session.seal(), payload]):
            self.unsent(link)

    def unsent(self, link: Link) -> None:
        """End a link whose frame could not be written."""
        self._end(link, "the connection is closed or full", notify=False)

    def send_to_all(self, payload: bytes) -> None:
        for link in list(self.by_peer.values()):
            self.send_message(link, payload)

    def drop(self, link: Link, reason: str) -> None:
        """End a link, and notify the peer."""
        self._end(link, reason, notify=True)

    def drop_silent(self, now: float, late: float) -> None:
        """End the links of silent peers.

        ``late``: seconds that the caller itself stood still since the last check. They do not count
        as silence.
        """
        for link in list(self.by_peer.values()):
            link.session.alive.overslept(late)
            fault = link.session.overdue(now)
            if fault is not None:
                self.drop(link, fault)

    def _greeted(self, identity: bytes, header: Header, hello: Hello, now: float) -> None:
        known = self._by_identity.get(identity)
        if known is not None:
            self._end(known, "greeted again", notify=False)
        session = Session(self._terms, now)
        refusal = session.answer(header, hello)
        if refusal is None and (header.source == NO_INCARNATION or len(self.by_peer) >= MAX_LINKS):
            refusal = "no more links"
        welcome = self._host.welcome(hello) if refusal is None else refusal
        if isinstance(welcome, str):
            self._refuse(identity, header, "refused", welcome)
            return
        old = self.by_peer.get(header.source)
        if old is not None:
            self._end(old, "connected again", notify=False)
        link = Link(identity, next(self._numbers), session)
        self._by_identity[identity] = self.by_peer[header.source] = link
        self._host.up(link, welcome)
        self.send_message(link, encode(welcome))

    def _refuse(self, identity: bytes, header: Header, kind: str, reason: str) -> None:
        self._host.dropped(kind, reason)
        head = write_header(self._terms.me, header.source, 0)
        self._write([identity, head, _reset(reason)])

    def _end(self, link: Link, reason: str, *, notify: bool) -> None:
        if self._by_identity.get(link.identity) is not link:
            return
        if notify:
            self._host.dropped("reset", reason)
            self._write([link.identity, link.session.seal(), _reset(reason)])
        del self._by_identity[link.identity]
        del self.by_peer[link.peer]
        link.session.end(reason)
        self._host.down(link, reason)


def _reset(reason: str) -> bytes:
    return encode(Reset(reason[:LONGEST_REASON]))
