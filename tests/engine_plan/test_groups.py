"""Hits, windows and states of a layout with groups; mutants of their rules are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.engine_plan.builders import LAYERS, Harness, facts_of_layers, request_of

from tandem.engine.cache.groups import NO_BLOCK, CacheGroup, CacheGroups
from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.config.layout import layer_groups
from tandem.engine.scheduler.planner import Planner
from tandem.protocol.card import KVGroup, KVKind
from tandem.protocol.ids import BlockHash

SHARED = [(7 * index) % 50 for index in range(100)]
HASHES = [BlockHash(bytes([index]) * 16) for index in range(8)]


def serve(layers: str) -> Harness:
    """Serve prompts that share prefixes of several lengths, with answers longer than a window."""
    harness = Harness(
        40 * len(LAYERS[layers]), facts=facts_of_layers(layers, 20), max_num_batched_tokens=24
    )
    for name, cut in (("a", 100), ("b", 100), ("c", 70), ("d", 37), ("e", 100)):
        prompt = [*SHARED[:cut], *range(3, 3 + len(name) * (100 - cut) // 10)]
        request = request_of(name, prompt)
        assert harness.add(request) is None
        harness.run()
        harness.check(request)
    harness.check_empty()
    return harness


@pytest.mark.parametrize("layers", sorted(LAYERS))
def test_each_layout_gives_each_request_its_tokens(layers):
    harness = serve(layers)
    assert any(output.num_cached_tokens for output in harness.outputs)


def leaves_early(self: CacheGroup, num_computed: int) -> int:
    """Free one block too many."""
    if self.window is None:
        return 0
    return max(0, num_computed - self.window + 1) // self.block_size + (num_computed > 40)


def never_cut(self, request, start, count):
    return count


SNAPSHOT, LONGEST = KVCacheManager.snapshot, CacheGroups.longest_prefix


def snapshot_of_an_earlier_border(self, request, num_tokens):
    """Name a state by a border before its last token."""
    if num_tokens > self.block_size:
        SNAPSHOT(self, request, num_tokens - self.block_size)


def full_attention_alone(self, hashes, find: Callable[[BlockHash], int | None]):
    """Compose a hit without asking windows and states."""
    found = LONGEST(CacheGroups((self.tables[0],)), hashes, find)
    rest = [[0] * len(found.tables[0]) for _ in self.all[1:]]
    return type(found)(
        found.num_tokens, (found.tables[0], *rest[: len(self.tables) - 1], *[[]] * len(self.states))
    )


@pytest.mark.parametrize(
    ("layers", "owner", "name", "mutant"),
    [
        ("mixed", CacheGroup, "first_needed", leaves_early),
        ("mixed", CacheGroups, "longest_prefix", full_attention_alone),
        ("hybrid", CacheGroups, "longest_prefix", full_attention_alone),
        ("hybrid", KVCacheManager, "snapshot", snapshot_of_an_earlier_border),
    ],
)
def test_mutants_of_the_rules_are_found(monkeypatch, layers, owner, name, mutant):
    """A block freed while a group reads it, a hit of unequal lengths, a snapshot with a token too
    many."""
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        serve(layers)


def test_layers_are_cut_into_groups_of_one_size():
    """Gemma 3 270M: three full layers, and fifteen with a window in five groups."""
    pattern = [KVKind.FULL if at % 6 == 5 else KVKind.WINDOW for at in range(18)]
    facts = replace(facts_of_layers("mixed", 512), num_layers=18, layer_kinds=tuple(pattern))
    groups = layer_groups(facts, block_size=16, dtype="float32")
    assert [(each.group.kind, each.group.num_layers) for each in groups] == [
        (KVKind.FULL, 3),
        *[(KVKind.WINDOW, 3)] * 5,
    ]
    assert groups[0].layers == (5, 11, 17)
    assert sorted(layer for each in groups for layer in each.layers) == list(range(18))


def groups_of(*kinds: KVKind, span: int = 20) -> CacheGroups:
    found = [
        KVGroup(
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=16,
            dtype="float32",
            kind=kind,
            span=span if kind is KVKind.WINDOW else None,
        )
        for kind in kinds
    ]
    return CacheGroups.of(found, 16, 32)


def test_a_hit_ends_at_the_longest_length_that_every_group_has():
    """Full attention has spans 0 to 4, the window 2 and 3, the states one after span 3."""
    groups = groups_of(KVKind.FULL, KVKind.WINDOW, KVKind.STATE)
    full, window, state = groups.all
    cached = {full.key(each): at for at, each in enumerate(HASHES[:5])}
    cached |= {window.key(HASHES[at]): 10 + at for at in (2, 3)}
    assert groups.longest_prefix(HASHES, cached.get).num_tokens == 0
    cached[state.key(HASHES[3])] = 20
    found = groups.longest_prefix(HASHES, cached.get)
    assert (found.num_tokens, found.snapshots) == (64, (20,))
    assert found.tables == ([0, 1, 2, 3], [NO_BLOCK, NO_BLOCK, 12, 13], [])


@pytest.mark.parametrize("tokens", [1, 16, 47, 200, 1000])
def test_a_sequence_holds_its_formula_of_blocks(tokens):
    """Full attention: all spans. A window: its own and one chunk's. A state: one."""
    groups = groups_of(KVKind.FULL, KVKind.WINDOW, KVKind.STATE)
    spans = -(-tokens // 16)
    assert groups.num_blocks(tokens) == spans + min(spans, -(-(20 + 32) // 16) + 1) + 1
    most = groups.max_tokens(groups.num_blocks(tokens), 10_000)
    assert most // 16 * 16 >= tokens // 16 * 16
    assert groups.num_blocks(most) <= groups.num_blocks(tokens)


@pytest.mark.parametrize("layers", ["window", "mixed"])
def test_a_long_prompt_never_holds_more_than_its_window_and_a_chunk(layers):
    """Blocks of the window are freed while the prompt is computed."""
    harness = Harness(
        30 + 10 * len(LAYERS[layers]), facts=facts_of_layers(layers, 20), max_num_batched_tokens=16
    )
    request = request_of("a", 400)
    assert harness.add(request) is None
    held = set()
    while harness.core.has_work:
        harness.step()
        running = harness.core.scheduler.request_table.running
        held |= {
            len(table) - start
            for each in running
            for group, table, start in zip(
                harness.core.manager.groups.all, each.block_tables, each.window_starts, strict=True
            )
            if group.window is not None
        }
    harness.check(request)
    assert max(held) <= harness.core.manager.groups.tables[-1].room


def test_chunks_of_a_hybrid_end_at_borders():
    """States are kept at the border before a prompt's end: an equal prompt begins there."""
    harness = Harness(64, facts=facts_of_layers("hybrid"), max_num_batched_tokens=64)
    for name in ("a", "b"):
        request = request_of(name, SHARED[:58])
        assert harness.add(request) is None
        harness.run()
        harness.check(request)
    cached = [each.num_cached_tokens for each in harness.outputs if each.position == 0]
    assert cached == [0, 48]


def test_without_the_cut_a_hybrid_finds_nothing(monkeypatch):
    """The cut at the border is what makes the hit."""
    monkeypatch.setattr(Planner, "_cut_at_border", never_cut)
    harness = Harness(64, facts=facts_of_layers("hybrid"), max_num_batched_tokens=64)
    for name in ("a", "b"):
        assert harness.add(request_of(name, SHARED[:58])) is None
        harness.run()
    cached = [each.num_cached_tokens for each in harness.outputs if each.position == 0]
    assert cached == [0, 0]
