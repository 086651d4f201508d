"""The items of a hand-off, each with its own rule of what makes it complete."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kvtransfer.machines import D_INC, P_POLICY, TOKEN, A, Face

from tandem.engine.cache.groups import CacheGroups
from tandem.kvtransfer.handoff import export as p
from tandem.kvtransfer.handoff import manifest as m
from tandem.kvtransfer.handoff.actions import Action, Millis, Pack, Send
from tandem.kvtransfer.handoff.exports import ExportTable
from tandem.kvtransfer.handoff.messages import Done, Gone, GoneReason, Open, Ready, Taken, Want
from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.protocol.card import KVGroup, KVKind
from tandem.protocol.errors import FailCause

BLOCK = 4
GROUPS = tuple(
    m.Group(
        kind=kind,
        span={KVKind.WINDOW: 6, KVKind.ENCODER: 10}.get(kind),
        block_bytes=1,
        blocks_per_part=2,
    )
    for kind in KVKind
)


def ranges(num_tokens: int) -> dict[KVKind, tuple[int, int]]:
    return {each.kind: (each.start, each.stop) for each in m.manifest(GROUPS, num_tokens)}


def test_each_kind_needs_something_else():
    """All of it, the tokens that the next one reads, one state, or an encoder's own positions."""
    assert ranges(19) == {
        KVKind.FULL: (0, 19),
        KVKind.WINDOW: (14, 19),
        KVKind.LATENT: (0, 19),
        KVKind.STATE: (18, 19),
        KVKind.DRAFT: (0, 19),
        KVKind.ENCODER: (0, 10),
    }
    assert ranges(3)[KVKind.WINDOW] == (0, 3)


@pytest.mark.parametrize(
    ("kind", "hit", "begins"),
    [
        (KVKind.FULL, 16, 16),
        (KVKind.WINDOW, 8, 12),
        (KVKind.WINDOW, 16, 16),
        (KVKind.FULL, 19, 19),
        (KVKind.STATE, 16, 18),
        (KVKind.ENCODER, 16, 0),
    ],
)
def test_what_d_has_cached_need_not_come(kind, hit, begins):
    """States and encoders are not cached by tokens."""
    item = next(each for each in m.manifest(GROUPS, 19) if each.kind is kind)
    assert m.begin(item, hit, BLOCK) == begins


def test_a_state_is_there_only_with_the_last_token():
    """Each chunk overwrites it; windows and full attention go on by blocks."""
    items = {each.kind: each for each in m.manifest(GROUPS, 19)}
    found = {
        kind: [m.available(items[kind], ready, 19, BLOCK) for ready in (6, 17, 19)]
        for kind in (KVKind.FULL, KVKind.WINDOW, KVKind.STATE)
    }
    assert found[KVKind.FULL] == [4, 16, 19]
    assert found[KVKind.WINDOW][1:] == [16, 19]
    assert [at > items[KVKind.STATE].start for at in found[KVKind.STATE]] == [False, False, True]


def test_blocks_are_found_in_the_groups_own_table():
    """A state has one block, wherever its token stands."""
    items = {each.kind: each for each in m.manifest(GROUPS, 19)}
    table = (10, 11, 12, 13, 14)
    assert m.blocks_of(items[KVKind.FULL], table, 4, 12, BLOCK) == (11, 12)
    assert m.blocks_of(items[KVKind.WINDOW], table, 12, 19, BLOCK) == (13, 14)
    assert m.blocks_of(items[KVKind.STATE], (7,), 18, 19, BLOCK) == (7,)
    assert m.num_blocks(18, 19, BLOCK) == 1


def test_a_block_that_left_a_window_is_never_named():
    """A table that lacks a required block is no cover, and its entry is no block."""
    items = {each.kind: each for each in m.manifest(GROUPS, 19)}
    window, state = items[KVKind.WINDOW], items[KVKind.STATE]
    left = (-1, -1, -1, 13, 14)
    assert m.covers(window, left, 12, BLOCK)
    assert m.blocks_of(window, left, 12, 19, BLOCK) == (13, 14)
    assert not m.covers(window, (-1, -1, -1, -1, 14), 12, BLOCK)
    assert not m.covers(window, left[:4], 12, BLOCK)
    assert not m.covers(state, (), 18, BLOCK)
    with pytest.raises(AssertionError, match="has left its table"):
        m.blocks_of(window, left, 8, 19, BLOCK)


@given(st.integers(1, 80), st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_a_window_is_what_the_engine_keeps_for_the_next_token(num_tokens, span, block_size):
    """P's engine has released all blocks before the first required one, and no other."""
    group = KVGroup(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        block_size=block_size,
        dtype="float32",
        kind=KVKind.WINDOW,
        span=span,
    )
    (item,) = m.manifest((group,), num_tokens)
    (kept,) = CacheGroups.of((group,), block_size, max_chunk=1).all
    assert item.start // block_size == kept.first_needed(num_tokens)


@given(
    st.integers(1, 60),
    st.integers(0, 14),
    st.lists(st.sampled_from(GROUPS), min_size=1, max_size=4),
)
def test_items_are_complete_only_all_together(num_tokens, hit, groups):
    items = m.manifest(groups, num_tokens)
    begun = m.begins(items, min(hit * BLOCK, num_tokens - 1) // BLOCK * BLOCK, BLOCK)
    assert all(start < item.stop for item, start in zip(items, begun, strict=True))
    ends = [item.stop for item in items]
    assert m.is_complete(items, ends)
    for index, end in enumerate(ends):
        assert not m.is_complete(items, [*ends[:index], end - 1, *ends[index + 1 :]])


def test_a_manifest_without_an_item_that_d_needs_fails_the_hand_off():
    """D goes by its own layout, and says what it got."""
    face = Face()
    face.open(A)
    face.deliver_d(Ready(A, 8, 8, (m.Item(0, KVKind.STATE, 7, 8),)))
    failed = face.d_told[-1]
    assert failed.cause is FailCause.IDENTITY
    assert "recurrent_state [7, 8), expected is full_attention [0, 8)" in failed.message


def test_done_without_an_item_is_answered_gone():
    """P, too, counts each item: what was never sent cannot have come."""
    policy = msgspec.structs.replace(P_POLICY, groups=(GROUPS[0], GROUPS[3]))
    table = ExportTable(policy, SlotRing(4, 4))
    actions: list[Action] = []
    for event in (
        p.Admit(A, D_INC, 8, None, link_up=True),
        p.Launched(A, ((0, 1), (2,)), 8),
        p.Fenced(A, 8),
        p.First(A, TOKEN, None),
        p.ConsumerMessage(A, D_INC, Open(A, None)),
        p.ConsumerMessage(A, D_INC, Want(A, 0, 1, (2, 1), BLOCK)),
        p.Packed(A, 0, ok=True),
        p.ConsumerMessage(A, D_INC, Taken(A, 0)),
    ):
        actions += table.apply(event, Millis(0))
    packs = [each for each in actions if isinstance(each, Pack)]
    assert [(each.group, each.block_ids) for each in packs] == [(0, (0, 1)), (1, (2,))]
    (told,) = table.apply(p.ConsumerMessage(A, D_INC, Done(A, ok=True)), Millis(0))[:1]
    assert told == Send(D_INC, Gone(A, GoneReason.PROTOCOL))
