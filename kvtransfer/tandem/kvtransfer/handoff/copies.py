"""Links on which D copies P's blocks itself: the blocks READY must name and D's copies. Pure.

P cuts no parts then: READY names blocks, and D cuts its own copies as soon as it has blocks for
them. Called by ``consumer`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tandem.kvtransfer.handoff.form import Form
from tandem.kvtransfer.handoff.manifest import Item, available, num_blocks
from tandem.kvtransfer.handoff.pull import ConsumerPolicy, Flight, Pull


def announced(
    direct: bool, items: Iterable[Item], upto: int, num_tokens: int, form: Form | ConsumerPolicy
) -> tuple[int, ...]:
    """Return how many blocks of each item READY names; empty if parts go through slots."""
    size, found = form.block_size, []
    for item in items if direct else ():
        stop = available(item, upto, num_tokens, size)
        found.append(num_blocks(item.start, stop, size) if stop > item.start else 0)
    return tuple(found)


def copies_cut(pull: Pull, policy: ConsumerPolicy) -> Pull:
    """Return the pull with a copy queued for all that was announced and is not under way."""
    if not pull.direct or pull.num_tokens is None:
        return pull
    form = pull.form or policy
    size, cut, queued, index = form.block_size, list(pull.cut), list(pull.queued), pull.next_index
    for item, group, remote in zip(pull.items, form.groups, pull.remote, strict=False):
        at = item.group
        until = available(item, pull.upto, pull.num_tokens, size)
        while cut[at] < until:
            start = cut[at]
            stop = min(until, (start // size + group.blocks_per_copy) * size)
            first, count = start // size - item.start // size, num_blocks(start, stop, size)
            theirs = remote[first : first + count]
            nbytes = count * group.block_bytes
            flight = Flight(index, start, stop, None, nbytes, group=at, remote_blocks=theirs)
            queued.append(flight)
            cut[at], index = stop, index + 1
    return msgspec.structs.replace(pull, cut=tuple(cut), queued=tuple(queued), next_index=index)
