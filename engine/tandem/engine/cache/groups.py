"""Rules of the groups of a KV layout: required blocks, keys in the prefix cache, longest hit.

A span is ``block_size`` tokens. A block table has one block for each span, a state one in all. A
prefix is a hit up to the longest length at which every group has all blocks that the next token
reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.protocol.card import KVGroup, KVKind, blocks_for
from tandem.protocol.ids import BlockHash

NO_BLOCK = -1
"""Entry of a block table whose span has left the window."""
IN_TIER = -2
"""Entry of a prefix whose block is in the offload tier only."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Cached blocks of a prompt's first tokens."""

    num_tokens: int
    tables: tuple[list[int], ...]
    """Blocks by group, as many as spans; empty for states."""
    snapshots: tuple[int, ...] = ()
    """States after the last token, by state group."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group."""

    index: int
    block_size: int
    window: int | None = None
    room: int = 0
    """Spans of a window and of the longest chunk after it."""
    is_state: bool = False

    def key(self, digest: BlockHash) -> BlockHash:
        """Return the key of a span's block in the prefix cache: its hash, in other groups than the
        first with the group's number."""
        return digest if not self.index else BlockHash(digest + self.index.to_bytes(2, "little"))

    def first_needed(self, num_computed: int) -> int:
        """Return the first span that the token after ``num_computed`` reads."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1) // self.block_size

    def num_held(self, num_tokens: int, num_computed: int) -> int:
        """Return the length of the table of a sequence of ``num_tokens`` tokens when the step
        after ``num_computed`` begins. A window's table grows with the chunks."""
        if self.is_state:
            return 1
        spans = blocks_for(num_tokens, self.block_size)
        if self.window is None:
            return spans
        return min(spans, self.first_needed(num_computed) + self.room)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """All groups of one layout, those of states last."""

    all: tuple[CacheGroup, ...]
    tables: tuple[CacheGroup, ...] = field(init=False)
    """Groups with a block for each span."""
    states: tuple[CacheGroup, ...] = field(init=False)
    nothing: CachedPrefix = field(init=False)
    """The prefix without tokens."""

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "tables", tuple(each for each in self.all if not each.is_state))
        put(self, "states", tuple(each for each in self.all if each.is_state))
        put(self, "nothing", CachedPrefix(0, tuple([] for _ in self.all)))

    @classmethod
    def of(cls, groups: Sequence[KVGroup], block_size: int, max_chunk: int) -> CacheGroups:
        """Return the rules of a layout's ``groups``; none is one of full attention. No step
        computes more than ``max_chunk`` tokens of a sequence."""
        found = []
        for index, group in enumerate(groups):
            window = group.span if group.kind is KVKind.WINDOW else None
            room = 0 if window is None else blocks_for(window + max_chunk, block_size) + 1
            state = group.kind is KVKind.STATE
            found.append(CacheGroup(index, block_size, window, room, is_state=state))
        return cls(tuple(found) or (CacheGroup(0, block_size),))

    @property
    def are_plain(self) -> bool:
        """Return whether there is one group of full attention."""
        return len(self.all) == 1 and self.all[0].window is None

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a new sequence of ``num_tokens``."""
        return sum(each.num_held(num_tokens, 0) for each in self.all)

    def max_tokens(self, num_blocks: int, longest: int) -> int:
        """Return the tokens, at most ``longest``, of a sequence that ``num_blocks`` hold."""
        size = self.all[0].block_size
        low, high = 0, blocks_for(longest, size)
        while low < high:
            spans = (low + high + 1) // 2
            low, high = (
                (spans, high) if self.num_blocks(spans * size) <= num_blocks else (low, spans - 1)
            )
        return min(longest, low * size)

    def longest_prefix(
        self, hashes: Sequence[BlockHash], find: Callable[[BlockHash], int | None]
    ) -> CachedPrefix:
        """Return the longest prefix of full spans with these ``hashes``; ``find`` returns the block
        of a key."""
        tables: list[list[int]] = [[] for _ in self.all]
        spans = len(hashes)
        for group in self.tables:
            if group.window is None:
                spans = min(spans, self._leading(group, hashes[:spans], find, tables[group.index]))
        snapshots: tuple[int, ...] = ()
        while spans:
            missing = self._last_missing(hashes, spans, find)
            if missing is not None:
                spans = missing
                continue
            found = [find(each.key(hashes[spans - 1])) for each in self.states]
            if None not in found:
                snapshots = tuple(each for each in found if each is not None)
                break
            spans -= 1
        if not spans:
            return self.nothing
        for group in self.tables:
            table = tables[group.index]
            if group.window is None:
                del table[spans:]
                continue
            first = group.first_needed(spans * group.block_size)
            table += [NO_BLOCK] * first
            for digest in hashes[first:spans]:
                block = find(group.key(digest))
                assert block is not None, "all spans of the window were found"
                table.append(block)
        return CachedPrefix(spans * self.all[0].block_size, tuple(tables), snapshots)

    def _leading(
        self,
        group: CacheGroup,
        hashes: Sequence[BlockHash],
        find: Callable[[BlockHash], int | None],
        table: list[int],
    ) -> int:
        for digest in hashes:
            block = find(group.key(digest))
            if block is None:
                break
            table.append(block)
        return len(table)

    def _last_missing(
        self, hashes: Sequence[BlockHash], spans: int, find: Callable[[BlockHash], int | None]
    ) -> int | None:
        """Return the last span before ``spans`` that a window requires and lacks, or None."""
        for group in self.tables:
            if group.window is None:
                continue
            first = group.first_needed(spans * group.block_size)
            for index in range(spans - 1, first - 1, -1):
                if find(group.key(hashes[index])) is None:
                    return index
        return None
