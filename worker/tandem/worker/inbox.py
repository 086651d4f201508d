"""What the step loop is told."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.link.wake_queue import WakeQueue
from tandem.protocol.ids import Incarnation
from tandem.protocol.messages import Call, Cancel, PeerSet, Submit


@dataclass(frozen=True, slots=True)
class FromRouter:
    """A message of a router for the step loop."""

    router: Incarnation
    message: Submit | Cancel | Call | PeerSet


@dataclass(frozen=True, slots=True)
class RouterFound:
    """A router greeted: it knows nothing of this worker yet."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The link to a router broke: nobody reads its requests' tokens any more."""

    router: Incarnation
    reason: str


Item = FromRouter | RouterFound | RouterLost | None
"""None only wakes the loop."""


Inbox = WakeQueue[Item]
"""Any thread puts; the step loop alone takes."""
