"""Items that other threads put for the step loop."""

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
    """Event: a router connected; it has no state of this worker yet."""

    router: Incarnation


@dataclass(frozen=True, slots=True)
class RouterLost:
    """Event: the link to a router broke; its requests' tokens are not read any more."""

    router: Incarnation
    reason: str


Item = FromRouter | RouterFound | RouterLost | None
"""None only wakes the loop."""


Inbox = WakeQueue[Item]
"""Any thread puts; the step loop alone takes."""
