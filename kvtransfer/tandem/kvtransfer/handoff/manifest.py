"""Manifest of one hand-off: typed items, each with its own rule of completeness. Pure.

P sends it in READY, and D compares it with its own layout's. An item is of one group; its range is
in tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.protocol.card import KVGroup, KVKind, KVLayout, blocks_for
from tandem.protocol.messages import Count

MAX_GROUPS = 96
CARRIED = frozenset({KVKind.FULL, KVKind.WINDOW, KVKind.LATENT, KVKind.STATE})
"""Kinds of KV that engines can hand over."""
RULES = {
    KVKind.FULL: "every block of [0, num_tokens)",
    KVKind.WINDOW: "the blocks of the last `span` - 1 tokens, which the next token reads",
    KVKind.LATENT: "every block of [0, num_tokens)",
    KVKind.STATE: "exactly one state, that after the last token",
    KVKind.DRAFT: "every block of [0, num_tokens)",
    KVKind.ENCODER: "every block of its own `span` positions",
}
"""Rule of completeness by kind, in words."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the layout, for the state machines."""

    kind: KVKind = KVKind.FULL
    span: int | None = None
    block_bytes: int
    """Bytes of this group in a block as it is sent."""
    blocks_per_part: int
    """Blocks of one part: as many as fit a slot after its header."""
    blocks_per_copy: int = 1
    """Blocks of one read, if blocks are copied into blocks."""
    part_bytes: int = 0
    rows: int = 1
    """Contiguous runs of a block's tokens: one for each head of K and V of each layer."""
    item_bytes: int = 1


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the manifest."""

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    """Index of the group in the layout, and in the manifest."""
    kind: KVKind
    start: Count
    stop: Count
    """Tokens [start, stop); an encoder's output has its own positions."""


def manifest(groups: Sequence[Group | KVGroup], num_tokens: int) -> tuple[Item, ...]:
    """Return the items that a sequence of ``num_tokens`` requires to continue, one a group."""
    return tuple(
        Item(index, group.kind, *_range(group, num_tokens)) for index, group in enumerate(groups)
    )


def _range(group: Group | KVGroup, num_tokens: int) -> tuple[int, int]:
    if group.kind is KVKind.WINDOW:
        return max(0, num_tokens - (group.span or 0) + 1), num_tokens
    if group.kind is KVKind.STATE:
        return num_tokens - 1, num_tokens
    if group.kind is KVKind.ENCODER:
        return 0, group.span or 0
    return 0, num_tokens


def begin(item: Item, from_token: int, block_size: int) -> int:
    """Return the first token of an item for a D that has cached blocks up to ``from_token``. It
    begins a block of ``block_size`` tokens, the smaller end's, except in states and encoders."""
    if item.kind in (KVKind.ENCODER, KVKind.STATE):
        return item.start
    first = max(item.start, from_token)
    return item.stop if first >= item.stop else first - first % block_size


def available(item: Item, ready: int, num_tokens: int, block_size: int) -> int:
    """Return the end of an item once the prompt's first ``ready`` tokens are computed: whole
    blocks, except at its end."""
    if ready == num_tokens:
        return item.stop
    if item.kind is KVKind.ENCODER:
        return item.stop if ready else item.start
    return min(ready - ready % block_size, item.stop)


def num_blocks(start: int, stop: int, block_size: int) -> int:
    """Return the number of blocks that hold tokens [start, stop) of an item."""
    return blocks_for(stop, block_size) - start // block_size


def num_required(layout: KVLayout, num_tokens: int) -> int:
    """Return the blocks of all groups that a sequence of ``num_tokens`` requires to continue."""
    size, items = layout.block_size, manifest(layout.groups, num_tokens)
    return sum(num_blocks(each.start, each.stop, size) for each in items)


def blocks_of(
    item: Item, table: Sequence[int], start: int, stop: int, block_size: int
) -> tuple[int, ...]:
    """Return the blocks of tokens [start, stop) of the group's block table; a state has one."""
    found = _entries(item, table, start, stop, block_size)
    assert min(found, default=0) >= 0, f"{item.kind} [{start}, {stop}) has left its table"
    return found


def _entries(
    item: Item, table: Sequence[int], start: int, stop: int, block_size: int
) -> tuple[int, ...]:
    if item.kind is KVKind.STATE:
        return tuple(table[:1])
    return tuple(table[start // block_size : blocks_for(stop, block_size)])


def covers(item: Item, table: Sequence[int], start: int, block_size: int) -> bool:
    """Return whether the group's block table has blocks for the item's tokens from ``start`` on."""
    if start >= item.stop:
        return True
    found = _entries(item, table, start, item.stop, block_size)
    return len(found) == num_blocks(start, item.stop, block_size) and min(found) >= 0


def begins(items: Iterable[Item], from_token: int, block_size: int) -> tuple[int, ...]:
    """Return ``begin`` of each item."""
    return tuple(begin(item, from_token, block_size) for item in items)


def is_complete(items: Iterable[Item], reached: Iterable[int]) -> bool:
    """Return whether every item is complete; ``reached`` is each item's end without a gap."""
    return all(at >= item.stop for item, at in zip(items, reached, strict=True))


def in_words(items: Sequence[Item]) -> str:
    """Return a manifest as text."""
    return ", ".join(f"{each.kind} [{each.start}, {each.stop})" for each in items) or "empty"


def why_not_carried(layout: KVLayout) -> str | None:
    """Return why a layout cannot be handed over, or None."""
    for index, group in enumerate(layout.groups):
        if group.kind not in CARRIED:
            allowed = ", ".join(sorted(CARRIED))
            return f"group {index} of the KV layout is {group.kind}; handed over is {allowed}"
    if not 1 <= len(layout.groups) <= MAX_GROUPS:
        count = len(layout.groups)
        return f"the KV layout has {count} groups; handed over are 1 to {MAX_GROUPS}"
    return None
