"""One end of a link, from HELLO to its end.

It has no socket and no clock. A caller sends HELLO; the WELCOME to it opens the link. A frame
belongs to the link if it is the peer's next one for this process. A frame of another incarnation, a
gap, a RESET or silence ends the link.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from hashlib import blake2b
from typing import TypeVar

from tandem.link.liveness import LinkTimes, Liveness
from tandem.protocol.errors import WireError
from tandem.protocol.ids import NO_INCARNATION, Incarnation
from tandem.protocol.link import HEADER, MAGIC, Header, read_header
from tandem.protocol.messages import Beat, Hello, Reset, Welcome

logger = logging.getLogger(__name__)

Message = TypeVar("Message")
_OWN = frozenset({Beat, Hello, Reset, Welcome})


class LinkState(StrEnum):
    """States of a link."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


class Verdict(Enum):
    """Results of a received frame."""

    DELIVER = "deliver"
    """The frame is the next one, for the user of the link."""
    NOTED = "noted"
    UP = "up"
    """The frame was the awaited WELCOME."""
    REFUSED = "refused"
    """The frame was a RESET instead of a WELCOME (``why``)."""
    GARBAGE = "garbage"
    """The bytes are not a frame: drop them."""
    STRAY = "stray"
    """The frame is of an earlier link, or out of sequence: drop it."""
    LOST = "lost"
    """The link has ended (``why``); send no RESET."""
    BROKEN = "broken"
    """The link has ended (``why``): send a RESET."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Identity of this end, and the values in which both ends must agree."""

    me: Incarnation
    protocol: str
    """Name of the protocol, for error texts."""
    version: int
    times: LinkTimes
    fingerprint: str = ""
    """Fingerprint of the served model; empty differs from all others."""
    secret: str | None = None
    """Secret that callers must know; None allows any caller."""
    forgiving: bool = False
    """Whether an invalid payload is ignored; else it counts as lost."""

    def hello(self, connectors: Sequence[str] = ()) -> Hello:
        auth = b"" if self.secret is None else mac(self.secret, self.me, self.fingerprint)
        return Hello(self.version, self.fingerprint, tuple(connectors), auth)

    def refusal(self, source: Incarnation, hello: Hello) -> str | None:
        """Return the reason to refuse a caller, or None."""
        if hello.version != self.version:
            return f"{self.protocol} {hello.version}; here it is {self.version}"
        if self.secret is not None:
            known = mac(self.secret, source, hello.fingerprint)
            if not hmac.compare_digest(hello.auth, known):
                return "wrong secret"
        if hello.fingerprint != self.fingerprint:
            return f"fingerprint {hello.fingerprint}; here it is {self.fingerprint}"
        return None

    def is_other_version(self, refusal: str) -> bool:
        """Return whether a RESET instead of a WELCOME names another version.

        Every release uses these words.
        """
        return refusal.startswith(f"{self.protocol} {self.version}; ")


class Session:
    """Session of one end, DOWN at first."""

    __slots__ = ("_expected", "_sent", "alive", "me", "peer", "state", "terms", "why")

    def __init__(self, terms: Terms, now: float = 0.0) -> None:
        self.terms = terms
        self.me = terms.me
        self.peer = NO_INCARNATION
        """Incarnation of the other end, known from its first frame."""
        self.state = LinkState.DOWN
        self.why = ""
        self.alive = Liveness(terms.times, now)
        self._sent = 0
        self._expected = 0

    def greet(self, now: float) -> bytes:
        """Begin again; return the header of the HELLO."""
        self.peer = NO_INCARNATION
        self._sent = self._expected = 0
        self.state = LinkState.GREETING
        self.alive.restart(now)
        return self.seal()

    def answer(self, header: Header, hello: Hello) -> str | None:
        """Take a HELLO: return None to send WELCOME, or the reason to send RESET."""
        self.peer = header.source
        if header.destination not in (self.me, NO_INCARNATION):
            return "HELLO for another process"
        refusal = self.terms.refusal(header.source, hello)
        if refusal is None:
            self.state = LinkState.UP
            self._expected = 1
        return refusal

    def seal(self) -> bytes:
        header = HEADER.pack(MAGIC, self.me, self.peer, self._sent)
        self._sent += 1
        return header

    def take(self, header: Header, message: object, now: float) -> Verdict:
        """Judge and count a received frame."""
        if self.state is LinkState.UP:
            if self._is_next(header):
                self._expected += 1
                self.alive.received(now)
                return Verdict.DELIVER if type(message) not in _OWN else self._own(message, now)
            return self._doubt(header, message)
        if header.destination == self.me and isinstance(message, Reset):
            self.why = message.reason
            return Verdict.REFUSED
        if self.state is not LinkState.GREETING or not isinstance(message, Welcome):
            return Verdict.STRAY
        if header.destination != self.me or header.sequence != 0 or header.source == NO_INCARNATION:
            return Verdict.STRAY
        self.peer = header.source
        self._expected = 1
        self.state = LinkState.UP
        self.alive.restart(now)
        return Verdict.UP

    def receive(
        self, parts: list[bytes], decode: Callable[[bytes], Message], now: float
    ) -> tuple[Verdict, Message | None]:
        """Decode and ``take`` what a caller's socket received."""
        header: Header | None = None
        try:
            if len(parts) != 2:
                raise WireError(f"message of {len(parts)} parts; it has 2")
            header = read_header(parts[0])
            message = decode(parts[1])
        except WireError as error:
            logger.debug("frame dropped: %s", error)
            if header is not None and self.terms.forgiving and self._is_next(header):
                self._expected += 1
            return Verdict.GARBAGE, None
        return self.take(header, message, now), message

    def end(self, why: str) -> None:
        self.state = LinkState.DOWN
        self.why = why

    def overdue(self, now: float) -> str | None:
        """Return the reason to count the other end as lost, or None."""
        return self.alive.overdue(now, greeting=self.state is LinkState.GREETING)

    def _is_next(self, header: Header) -> bool:
        return (
            header.sequence == self._expected
            and header.source == self.peer
            and header.destination == self.me
        )

    def _own(self, message: object, now: float) -> Verdict:
        if isinstance(message, Beat):
            self.alive.progress(now, message)
            return Verdict.NOTED
        if isinstance(message, Reset):
            self.end(f"it sent RESET: {message.reason}")
            return Verdict.LOST
        return Verdict.STRAY

    def _doubt(self, header: Header, message: object) -> Verdict:
        """Judge a frame that is out of sequence. A RESET may be: its sender has lost count."""
        if header.source != self.peer and header.sequence == 0:
            self.end("another process answers there")
            return Verdict.LOST
        if isinstance(message, Reset) and header.destination == self.me:
            self.end(f"it sent RESET: {message.reason}")
            return Verdict.LOST
        self.end("a frame was lost or misdirected")
        return Verdict.BROKEN


def mac(secret: str, incarnation: Incarnation, fingerprint: str) -> bytes:
    """Return the MAC that a HELLO must carry: 16 bytes over the sender and its fingerprint."""
    key = blake2b(secret.encode(), digest_size=32).digest()
    data = incarnation + fingerprint.encode()
    return blake2b(data, key=key, digest_size=16, person=b"tandem-hello").digest()
