"""Hand-offs of full attention, sliding windows and recurrent states, over real services."""

import pytest
from tests.kvtransfer.builders import Producer, make_config, make_key
from tests.kvtransfer.grouped import UNTOUCHED, Grouped, grouped_layout, tables_of

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.manifest import num_required
from tandem.protocol.card import KVKind, KVLayout
from tandem.protocol.errors import FailCause, RefusalCode

TOKENS = 43
"""Two chunks, and a last block that is not full, of whatever size."""
SIZES = [(4, 4), (4, 16), (16, 4)]


@pytest.mark.parametrize("hit", [0, 16, 32, 36])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("connector", ["tcp", "shm"])
def test_all_that_the_next_token_reads_is_handed_over(workers, connector, sizes, hit):
    """Local hits end before, at and inside the window; no other block is written."""
    if hit % sizes[1]:
        hit = 0
    pair = Grouped(workers, make_config(kv_connector=connector), sizes)
    tables = pair.hand_over("a", TOKENS, hit)
    assert pair.differences("a", TOKENS, hit, tables) == []
    written = {block for table in tables for block in table[hit // sizes[1] :]}
    written |= {table[0] for table in tables[3:]}
    others = [block for block in range(64) if block not in written]
    assert bool((pair.consumer.kv_cache[others] == UNTOUCHED).all())


def test_an_agent_copies_the_blocks_of_all_groups(workers, node):
    folder = str(node.agent.path.parent)
    config = make_config(kv_connector="shm_agent", kv_node_folder=folder)
    pair = Grouped(workers, config, (4, 4))
    tables = pair.hand_over("a", TOKENS)
    assert pair.differences("a", TOKENS, 0, tables) == []


@pytest.mark.parametrize("connector", ["tcp", "shm"])
def test_a_full_hit_reads_nothing(workers, connector):
    """Also not the state: D has that after the last token."""
    pair = Grouped(workers, make_config(kv_connector=connector), (4, 4))
    pair.hand_over("a", 32, hit=32)
    assert bool((pair.consumer.kv_cache == UNTOUCHED).all())


@pytest.mark.parametrize("sizes", SIZES)
def test_states_are_sent_unchanged_if_attention_is_narrowed(workers, sizes):
    pair = Grouped(workers, make_config(kv_wire_dtype="fp8"), sizes)
    tables = pair.hand_over("a", TOKENS)
    wrong = pair.differences("a", TOKENS, 0, tables)
    assert {group for group, _, _ in wrong} == {0, 1, 2}
    assert max(difference for _, _, difference in wrong) < 0.3


@pytest.mark.parametrize("group", [1, 3])
def test_a_load_without_a_required_block_fails_and_names_the_tables(workers, group):
    """A window's block, and a state's."""
    pair = Grouped(workers, make_config(), (4, 4))
    pair.admit("a", TOKENS)
    tables = list(tables_of(pair.mine, TOKENS, TOKENS, seed=1))
    tables[group] = (*[-1] * 9, *tables[group][9:]) if group == 1 else ()
    pair.load("a", TOKENS, 0, tuple(tables))
    failed = pair.consumer.wait_for(events.LoadFailed, make_key("a"))
    assert failed.cause is FailCause.INTERNAL
    assert "does not fit a prompt of 43 tokens" in failed.message


def test_the_lease_quota_counts_the_blocks_of_all_groups(workers):
    """A window counts what the next token reads, a state one block."""
    layout = grouped_layout(4)
    assert [num_required(layout, count) for count in (4, 8, 40, 400)] == [5, 8, 18, 108]
    producer = workers(Producer, make_config(), layout=layout)
    assert producer.service.max_blocks == 57
    assert producer.service.max_tokens == 196
    assert [producer.service.tokens_in(count) for count in (-1, 4, 5, 8, 18)] == [0, 0, 4, 8, 40]
    pair = Grouped(workers, make_config(), (4, 4))
    refusal = pair.producer.admit(make_key("a"), 197, pair.consumer.incarnation)
    assert refusal.code is RefusalCode.NEVER_FITS
    assert pair.producer.admit(make_key("b"), 196, pair.consumer.incarnation) is None


def test_a_prompt_of_any_length_is_handed_over_if_all_layers_have_windows(workers):
    """Blocks that left the windows are not part of it."""
    windows = KVLayout(grouped_layout(4).groups[1:2])
    assert windows.groups[0].kind is KVKind.WINDOW
    assert workers(Producer, make_config(), layout=windows).service.max_tokens is None


def test_bytes_of_a_part_are_those_of_its_groups(workers):
    """Blocks travel without what is beyond their group's KV."""
    pair = Grouped(workers, make_config(), (4, 4))
    pair.hand_over("a", TOKENS)
    loaded = {"role": "consumer", "outcome": "loaded"}
    pair.consumer.until(lambda: pair.consumer.metric("tandem:kv_handoffs_total", **loaded))
    sent = pair.consumer.metric("tandem:kv_handoff_bytes_total", role="consumer")
    counts = {KVKind.FULL: 11, KVKind.WINDOW: 3, KVKind.STATE: 1}
    own = sum(each.block_bytes * counts[each.kind] for each in pair.mine.groups)
    assert own < sent < 1.25 * own
