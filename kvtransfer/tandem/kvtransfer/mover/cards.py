"""Whether what a producer's card says of it can be true, and goes together with this worker. Pure.

Asked once a link, before its transport is: what is refused here costs that link alone.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem.kvtransfer.handoff.manifest import why_not_carried
from tandem.kvtransfer.handoff.messages import ProducerCard
from tandem.protocol.layout import KVLayout

MOST_SLOT_BYTES = 1 << 44
"""Of all slots of a worker: places in them are numbers that every transport can write."""


def why_refused(card: ProducerCard, layout: KVLayout, offered: Collection[str]) -> str | None:
    """What stands between the peer and this worker, if anything. ``offered`` are the transports
    that this worker has."""
    if card.connector not in offered:
        ours = ", ".join(offered)
        return f"the peer chose connector {card.connector!r}; offered is {ours}"
    if not 0 < card.slot_bytes * (card.num_slots + 1) <= MOST_SLOT_BYTES:
        said = f"{card.num_slots} slots of {card.slot_bytes} bytes"
        return f"the peer has {said}; allowed are 1 to {MOST_SLOT_BYTES} bytes in all"
    mine = tuple(str(each.kind) for each in layout.groups)
    if card.groups != mine:
        theirs = ", ".join(card.groups) or "none"
        return f"the peer's groups of KV are {theirs}; here they are {', '.join(mine)}"
    return why_not_carried(layout)
