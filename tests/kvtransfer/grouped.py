"""A producer and a consumer of a model with full attention, sliding windows and recurrent states.

Both have tables as engines make them: entries that left a window are -1 and their blocks are
reused, and a state has one block, which each chunk overwrites.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from tests.kvtransfer.builders import (
    NUM_BLOCKS,
    Consumer,
    Producer,
    Switch,
    make_key,
)
from tests.kvtransfer.unequal import hashes_of

from tandem.engine.cache.groups import CacheGroups
from tandem.kvtransfer import events
from tandem.protocol.card import KVGroup, KVKind, KVLayout, blocks_for
from tandem.protocol.kv import BlockTables

SPAN = 10
CHUNK = 24
REUSED, UNTOUCHED = 9, 1
"""Bytes of P's blocks that left a window, and of D's before the hand-off."""


def grouped_layout(block_size: int) -> KVLayout:
    """One full group, two windows, two states. A block is larger than any group's KV."""

    def attention(kind: KVKind, span: int | None = None) -> KVGroup:
        return KVGroup(
            num_layers=2,
            num_kv_heads=2,
            head_dim=16,
            block_size=block_size,
            dtype="float32",
            kind=kind,
            span=span,
        )

    window = attention(KVKind.WINDOW, SPAN)
    state = KVGroup(
        num_layers=1,
        num_kv_heads=3,
        head_dim=200,
        block_size=block_size,
        dtype="float32",
        kind=KVKind.STATE,
    )
    layout = KVLayout((attention(KVKind.FULL), window, window, state, state))
    assert layout.block_bytes > max(each.block_bytes for each in layout.groups)
    return layout


def tables_of(layout: KVLayout, num_tokens: int, computed: int, seed: int) -> BlockTables:
    """The tables of a sequence when the step after ``computed`` tokens begins; the same blocks for
    the same ``seed``."""
    size = layout.block_size
    spans = blocks_for(num_tokens, size)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for group in CacheGroups.of(layout.groups, size, CHUNK).all:
        count = 1 if group.is_state else spans
        mine, order = order[:count], order[count:]
        first = 0 if group.is_state else group.first_needed(computed)
        found.append((*[-1] * first, *mine[first:]))
    return tuple(found)


def values(name: str, group: int, token: int, count: int) -> torch.Tensor:
    """float32 [count]: a token's KV in all layers and heads, or the state after it."""
    seed = hash((name, group, token)) & (1 << 62) - 1
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Grouped:
    """A linked pair whose blocks have ``sizes`` tokens."""

    def __init__(self, workers, config, sizes: tuple[int, int]) -> None:
        self.theirs, self.mine = (grouped_layout(size) for size in sizes)
        self.producer = workers(Producer, config, layout=self.theirs)
        self.consumer = workers(Consumer, config, layout=self.mine)
        self.consumer.meet(self.producer)
        self.producer.kv_cache.fill_(7)
        self.consumer.kv_cache.fill_(UNTOUCHED)

    def at(self, end: Producer | Consumer, group: int, tables: BlockTables, token: int):
        """The place of a token's KV, [layer, K|V, head, head_dim], or of a state."""
        layout = self.theirs if end is self.producer else self.mine
        what, size = layout.groups[group], layout.block_size
        is_state = what.kind is KVKind.STATE
        block = tables[group][0 if is_state else token // size]
        assert block >= 0, f"token {token} of group {group} has left its window"
        numbers = end.kv_cache[block, : what.block_bytes].view(torch.float32)
        numbers = numbers.view(what.block_shape)
        return numbers[:, :, :, 0 if is_state else token % size]

    def compute(self, name: str, num_tokens: int, seed: int = 0) -> None:
        """P's prompt in chunks, each announced when it is written."""
        key, service, size = make_key(name), self.producer.service, self.theirs.block_size
        for start, stop in pairwise([*range(0, num_tokens, CHUNK), num_tokens]):
            tables = tables_of(self.theirs, num_tokens, start, seed)
            whole = tables_of(self.theirs, num_tokens, 0, seed)
            for before, after in zip(whole, tables, strict=True):
                left = [block for block in before if block not in after]
                self.producer.kv_cache[left] = REUSED
            for group, what in enumerate(self.theirs.groups):
                is_state = what.kind is KVKind.STATE
                for token in [stop - 1] if is_state else range(start, stop):
                    place = self.at(self.producer, group, tables, token)
                    place[:] = values(name, group, token, place.numel()).view(place.shape)
            service.computed(key, tables, stop, Switch(done=True), hashes_of(name, stop, size))

    def admit(self, name: str, num_tokens: int) -> None:
        key = make_key(name)
        self.consumer.open(key, self.producer.incarnation)
        assert self.producer.admit(key, num_tokens, self.consumer.incarnation) is None
        self.producer.service.started(key)

    def load(self, name: str, num_tokens: int, hit: int, tables: BlockTables) -> None:
        key = make_key(name)
        assert self.consumer.wait_for(events.Ready, key).num_tokens == num_tokens
        hashes = hashes_of(name, num_tokens, self.theirs.block_size)
        self.consumer.service.begin_load(key, tables, hit, num_tokens, hashes)

    def hand_over(self, name: str, num_tokens: int, hit: int = 0) -> BlockTables:
        """All of it; D's tables."""
        mine = tables_of(self.mine, num_tokens, num_tokens, seed=1)
        self.admit(name, num_tokens)
        self.load(name, num_tokens, hit, mine)
        self.compute(name, num_tokens)
        self.producer.end(make_key(name))
        ending = (events.Loaded, events.LoadFailed)
        assert isinstance(self.consumer.wait_for(ending, make_key(name)), events.Loaded)
        return mine

    def differences(
        self, name: str, num_tokens: int, hit: int, tables: BlockTables
    ) -> Sequence[tuple[int, int, float]]:
        """(group, token, largest difference) of each required value that is another than P's."""
        found = []
        for group, what in enumerate(self.mine.groups):
            first = hit
            if what.kind is not KVKind.FULL:
                first = max(hit, num_tokens - SPAN + 1)
            if what.kind is KVKind.STATE:
                first = num_tokens - 1
            for token in range(first, num_tokens):
                place = self.at(self.consumer, group, tables, token)
                wanted = values(name, group, token, place.numel()).view(place.shape)
                if not torch.equal(place, wanted):
                    found.append((group, token, float((place - wanted).abs().max())))
        return found
