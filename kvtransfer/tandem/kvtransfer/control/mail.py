"""Messages between the control thread and the transfer thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from tandem.kvtransfer.handoff.messages import (
    KeyedToConsumer,
    KeyedToProducer,
    Message,
    Probe,
    ProbeDone,
    ProbeReady,
    ProducerCard,
)
from tandem.protocol.ids import Incarnation, RequestKey

LinkNumber = NewType("LinkNumber", int)
"""Number of a link of a service; never reused."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """HELLO and WELCOME were exchanged."""

    peer: Incarnation
    link: LinkNumber
    connector: str
    host: str = ""
    welcome: ProducerCard | None = None


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The link broke: all its keys have failed."""

    peer: Incarnation
    link: LinkNumber
    reason: str


@dataclass(frozen=True, slots=True)
class FromPeer:
    """A message for the transfer thread."""

    peer: Incarnation
    link: LinkNumber
    message: KeyedToConsumer | KeyedToProducer | Probe | ProbeReady | ProbeDone


@dataclass(frozen=True, slots=True)
class MessageTooLong:
    """P: a message of this key is too long for a peer and was not sent."""

    peer: Incarnation
    link: LinkNumber
    key: RequestKey


@dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message if this link is still up."""

    link: LinkNumber
    message: Message


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the link, and wait ``rest_ms`` before the next one is made."""

    link: LinkNumber
    reason: str
    rest_ms: int = 0
    without: str = ""
    """D: a transport, not the last one, that the next link does not offer."""
    without_ms: int = 0
    """Time for which it is not offered; 0 offers it again."""


@dataclass(frozen=True, slots=True)
class SetPeers:
    """D: keep links to these control sockets (``host:port``) only."""

    endpoints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


ToMover = LinkUp | LinkDown | FromPeer | MessageTooLong
ToControl = SendMessage | Drop | SetPeers | Stop
