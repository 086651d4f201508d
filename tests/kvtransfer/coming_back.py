"""Links that come back to their better way when a test has seen what came before.

By the clock, a link that a busy machine was slow to bring up was due for its better way, and gone,
before anybody had handed over on it.
"""

from __future__ import annotations

from tests.kvtransfer.builders import Consumer, make_key

from tandem.kvtransfer.handoff.actions import Millis
from tandem.kvtransfer.handoff.pull import Cancel


def comes_back(consumer: Consumer, connector: str) -> None:
    """Until the consumer's one link goes by this way again: the pause after its fall is over now,
    and so is each after a try in vain."""
    mover = consumer.service._mover

    def is_back() -> bool:
        for each in list(mover.ways._peers.values()):
            if each.due is not None:
                each.due = Millis(0)
        mover.inbox.put(Cancel(make_key("nobody's")))  # it looks
        (health,) = consumer.service.peer_health()
        return health.up and health.transport == connector

    consumer.until(is_back)
