"""The routers that are connected to a worker, between the listener and the step loop's inbox.

No thread and no socket: ``write`` is the socket's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.link.frames import decode_to_worker
from tandem.link.listener import Link, Listener
from tandem.link.liveness import LinkTimes
from tandem.link.session import Terms
from tandem.protocol.card import PROTOCOL_VERSION, ModelCard
from tandem.protocol.ids import Incarnation
from tandem.protocol.link import WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS
from tandem.protocol.messages import (
    Call,
    Cancel,
    Hello,
    PeerSet,
    Submit,
    ToRouter,
    Welcome,
    WorkerBeat,
    encode,
)
from tandem.worker.inbox import FromRouter, Inbox, RouterFound, RouterLost
from tandem.worker.link_metrics import LinkMetrics

logger = logging.getLogger(__name__)

TIMES = LinkTimes(WORKER_BEAT_SECONDS, WORKER_PATIENCE_SECONDS)
"""No setting: routers hold theirs to it."""


class RouterLinks:
    """One thread at a time, ``read`` apart."""

    def __init__(
        self,
        card: ModelCard,
        me: Incarnation,
        *,
        inbox: Inbox,
        metrics: LinkMetrics,
        write: Callable[[list[bytes]], bool],
    ) -> None:
        """``write``: identity, header and payload to the socket; False where they cannot be sent.
        Never blocks."""
        self._card = card
        self._inbox = inbox
        self._metrics = metrics
        self.write = write
        terms = Terms(me, "protocol", PROTOCOL_VERSION, TIMES)
        self.listener = Listener(terms, decode_to_worker, self)
        self.read = self.listener.read
        self.take = self.listener.take
        self._by_peer = self.listener.by_peer

    def say(self, router: Incarnation | None, message: ToRouter) -> None:
        """Write a message to one router, or to all (None)."""
        if router is None:
            self.listener.say_all(encode(message))
            return
        link = self._by_peer.get(router)
        if link is None:
            self._metrics.dropped("router gone")
        elif not self.write([link.identity, link.session.seal(), encode(message)]):
            self.listener.unsent(link)

    def beat(self, beat: WorkerBeat, now: float, late: float) -> None:
        """Forget the routers that are silent (see ``Listener.drop_silent``), beat the others."""
        self.listener.drop_silent(now, late)
        self.say(None, beat)

    # What the listener asks of its host.

    def welcome(self, hello: Hello) -> Welcome[ModelCard]:
        """The worker's card, for any router."""
        return Welcome(self._card)

    def up(self, link: Link, welcome: object) -> None:
        """A router greeted."""
        self._metrics.routers(len(self._by_peer))
        self._inbox.put(RouterFound(link.peer))

    def deliver(self, link: Link, message: Submit | Cancel | Call | PeerSet) -> bool:
        """Something for the step loop."""
        return self._inbox.offer(FromRouter(link.peer, message))

    def down(self, link: Link, reason: str) -> None:
        """A router is gone."""
        self._metrics.routers(len(self._by_peer))
        logger.info("router %s lost: %s", link.peer.hex()[:8], reason)
        self._inbox.put(RouterLost(link.peer, reason))

    def dropped(self, kind: str, words: str) -> None:
        """A frame fits nowhere."""
        self._metrics.dropped("garbage" if kind in ("garbage", "stray") else "reset")
        logger.debug("%s: %s", kind, words)
