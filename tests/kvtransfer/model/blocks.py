"""Where KV lies in a world: the block tables of both ends, what a block must hold, and P's tags."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tandem.kvtransfer.handoff.form import Form, WireDtype, form_of_copies, form_of_parts
from tandem.kvtransfer.handoff.manifest import Group
from tandem.kvtransfer.memory.blocks import BlockTags, tag_of
from tandem.protocol.card import KVKind
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import BlockTables

if TYPE_CHECKING:
    from tests.kvtransfer.model.parts import Setup

WINDOW = 1
"""Computed tokens that the next one reads in a sliding window, whose span is one more."""


class Home(Enum):
    """Which blocks of P the keys have. D's are always their own."""

    OWN = "own"
    """Each key its own."""
    REUSED = "reused"
    """All the same ones, of which a key gets what the one before it has let go of."""
    SHARED = "shared"
    """All the same ones at once, as the keys have one prompt, whose blocks have hashes."""


class Lending(NamedTuple):
    holds: bool = True
    """Lent blocks are not evicted (False: a mutation)."""
    fences: bool = True
    """A loan is announced when its blocks are written (False: a mutation)."""


def total(setup: Setup) -> int:
    return setup.num_keys * setup.num_blocks * len(setup.kinds)


@lru_cache
def tables(setup: Setup, index: int) -> tuple[tuple[int, ...], ...]:
    """D's blocks of a key, by group."""
    size, groups = setup.num_blocks, len(setup.kinds)
    starts = range(index * size * groups, (index + 1) * size * groups, size)
    return tuple(tuple(range(start, start + size)) for start in starts)


def home(setup: Setup, index: int) -> tuple[tuple[int, ...], ...]:
    """P's blocks of a key, by group."""
    return tables(setup, index if setup.home is Home.OWN else 0)


def first_kept(kind: KVKind, computed: int, size: int) -> int:
    """The first block that the token after ``computed`` ones reads."""
    return max(0, computed - WINDOW) // size if kind is KVKind.WINDOW else 0


def in_blocks(setup: Setup, places: BlockTables, computed: int, size: int) -> BlockTables:
    """Block tables of places of tokens, where a block has so many of them, as engines make them
    once so many are computed."""
    found = []
    for kind, table in zip(setup.kinds, places, strict=True):
        first = first_kept(kind, computed, size)
        blocks = tuple(at // size for at in table[::size])
        found.append(blocks[:1] if kind is KVKind.STATE else (-1,) * first + blocks[first:])
    return tuple(found)


def left(setup: Setup, index: int, computed: int) -> tuple[int, ...]:
    """P's places of a key that left a window."""
    size = setup.p_block
    return tuple(
        at
        for kind, table in zip(setup.kinds, home(setup, index), strict=True)
        for at in table[: first_kept(kind, computed, size) * size]
    )


def place_in(kind: KVKind, blocks: tuple[int, ...], start: int, token: int, size: int) -> int:
    """Where a token lies, of blocks that begin with the one of token ``start``; a state lies at the
    start of its block."""
    if kind is KVKind.STATE:
        return blocks[0] * size
    return blocks[token // size - start // size] * size + token % size


def form_of(setup: Setup, groups: tuple[Group, ...]) -> Form | None:
    if setup.direct:
        form = form_of_copies(groups, setup.d_block, setup.p_block, 1 << 16)
        assert not isinstance(form, str)
        return form
    return form_of_parts(groups, setup.d_block, setup.p_block, WireDtype.AUTO)


def place_of(setup: Setup, index: int, block: int) -> tuple[int, int]:
    """Group and index in its block table, as tags count it, of a block of P that a key has."""
    tables_of_p = home(setup, index)
    group = next(at for at, table in enumerate(tables_of_p) if block in table)
    if setup.kinds[group] is KVKind.STATE:
        return group, setup.num_blocks - 1
    return group, tables_of_p[group].index(block)


def content(setup: Setup, index: int, block: int, producer: Incarnation) -> tuple[object, ...]:
    """What the block at P holds when it is written: the same for keys of one prompt."""
    return (0 if setup.home is Home.SHARED else index, block, producer)


@lru_cache
def needed(setup: Setup, index: int) -> tuple[tuple[int, int], ...]:
    """D's and P's blocks that D cannot go on without, by what each kind means and not by the
    manifest."""
    found: list[tuple[int, int]] = []
    if setup.hit == setup.num_blocks:  # of all groups, states included
        return ()
    hit, last = setup.hit, setup.num_blocks - WINDOW
    here, there = tables(setup, index), home(setup, index)
    for kind, mine, theirs in zip(setup.kinds, here, there, strict=True):
        pairs = list(zip(mine, theirs, strict=True))
        if kind is KVKind.STATE:
            found.append(pairs[0])
        else:
            found += pairs[max(hit, last) if kind is KVKind.WINDOW else hit :]
    return tuple(found)


@lru_cache
def hashes(setup: Setup) -> tuple[BlockHash, ...]:
    """Of the one prompt that keys share; else tags are the keys' own."""
    count = setup.num_blocks if setup.home is Home.SHARED else 0
    return tuple(BlockHash(bytes([n + 1]) * 16) for n in range(count))


@lru_cache
def tag(setup: Setup, key: RequestKey, group: int, index: int) -> bytes:
    """What both ends say that a block's tag must be."""
    return tag_of(key, group, index, hashes(setup))


def copied(tags: BlockTags) -> BlockTags:
    other = type(tags)(0)
    other._bytes = tags._bytes[:]
    other._turns_at = tags._turns_at
    other._by_key = {key: list(each) for key, each in tags._by_key.items()}
    other._holders = dict(tags._holders)
    return other


def sign(tags: BlockTags) -> tuple[object, ...]:
    """A hashable value, equal for tags that behave alike: what a key has set follows from how much
    it was, and of turns counts what a read under way says of them (``InFlight.stale``)."""
    set_by = tuple((key, len(each)) for key, each in sorted(tags._by_key.items()))
    return bytes(tags._bytes[: tags._turns_at]), set_by, tuple(sorted(tags._holders.items()))
