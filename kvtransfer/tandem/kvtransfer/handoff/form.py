"""Block size and type in which KV is sent if those of the ends differ. Pure.

Parts are cut in blocks of the smaller end, copies in P's blocks, which have the tags. States are
sent unchanged. D chooses the form by its settings and P's WELCOME, and sends it in WANT. If one end
holds codes and the other numbers, codes are sent: P rounds its numbers, or D reads them as numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tandem.kvtransfer.handoff.manifest import Group
from tandem.protocol.card import FP8_CODES, KVKind

SCALE_BYTES = 4
"""Bytes of a float32."""


class WireDtype(StrEnum):
    """Type of KV in slots."""

    AUTO = "auto"
    FP8 = "fp8"
    """float8_e4m3fn, with a float32 scale for each head of K and V of each layer in each block."""
    CODES = "codes"
    """float8_e4m3fn by the model's scales, which both ends have; not a setting."""


class Form(msgspec.Struct, frozen=True):
    """Block sizes and number type in which one hand-off sends KV."""

    block_size: int
    """Tokens of a block as sent."""
    groups: tuple[Group, ...]
    """Groups of the layout, with the sizes of such blocks."""
    dtype: WireDtype = WireDtype.AUTO


def is_ratio(one: int, other: int) -> bool:
    """Return whether one number is a multiple of the other."""
    return min(one, other) > 0 and max(one, other) % min(one, other) == 0


def form_of_parts(groups: Sequence[Group], own: int, other: int, dtype: WireDtype) -> Form | None:
    """Return the form of parts between ``own`` blocks (of ``groups``) and the other end's; None if
    KV is sent unchanged."""
    size = min(own, other)
    if size == max(own, other) and dtype is WireDtype.AUTO:
        return None
    cut = tuple(_on_its_way(each, own, size, dtype) for each in groups)
    return Form(size, cut, dtype)


def _on_its_way(group: Group, own: int, size: int, dtype: WireDtype) -> Group:
    if group.kind is KVKind.STATE:
        return group
    nbytes = group.block_bytes * size // own
    if dtype is not WireDtype.AUTO:
        nbytes //= group.item_bytes
    if dtype is WireDtype.FP8:
        nbytes += group.rows * SCALE_BYTES
    return msgspec.structs.replace(
        group, block_bytes=nbytes, blocks_per_part=max(1, group.part_bytes // nbytes)
    )


def are_convertible(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether the types of the ends' groups are equal, or codes at one of them."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a == b or FP8_CODES in (a, b) for a, b in pairs)


def form_of_copies(
    groups: Sequence[Group], own: int, theirs: int, max_pieces: int
) -> Form | str | None:
    """Return the form of copies of blocks of ``theirs`` tokens into those of ``own`` (of
    ``groups``). None copies whole blocks; a text reports over ``max_pieces`` pieces."""
    if own == theirs:
        return None
    cut = []
    for group in groups:
        if group.kind is KVKind.STATE:
            cut.append(group)
            continue
        pieces = group.rows * max(1, theirs // own)
        if pieces > max_pieces:
            return (
                f"a block of {theirs} tokens there is {pieces} pieces of blocks of {own} here; "
                f"it copies at most {max_pieces} at once"
            )
        most = max(1, min(group.blocks_per_copy, max_pieces // pieces))
        nbytes = group.block_bytes * theirs // own
        cut.append(msgspec.structs.replace(group, block_bytes=nbytes, blocks_per_copy=most))
    return Form(theirs, tuple(cut))
