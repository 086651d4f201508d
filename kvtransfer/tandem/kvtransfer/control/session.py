"""One link to one peer process, from HELLO to its end, as one end sees it. Pure.

A session never outlives a doubt: a frame from another incarnation, for another incarnation, or
out of sequence ends it, and its keys fail. The model checker runs this class.
"""

from __future__ import annotations

from tandem.protocol.ids import NOBODY, Incarnation
from tandem.protocol.link import Header, Link, Verdict


class Session:
    """Headers of one link."""

    def __init__(self, me: Incarnation) -> None:
        self.link = Link(me)

    @property
    def peer(self) -> Incarnation:
        """The other end, NOBODY until its first frame."""
        return self.link.peer

    def seal(self) -> bytes:
        """Header of the next frame."""
        return self.link.seal()

    def accept(self, header: Header) -> bool:
        """Whether the frame belongs here and is the next one; False ends the session."""
        known = self.link.peer != NOBODY
        verdict = self.link.accept(header)
        return verdict is Verdict.DELIVER or (verdict is Verdict.NEW_PEER and not known)
