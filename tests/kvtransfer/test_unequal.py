"""Hand-offs between workers whose blocks differ in size: by slots, and from blocks into blocks."""

import msgspec
import pytest
import torch
from tests.kvtransfer.builders import Consumer, Producer, Switch, make_config, make_key, only
from tests.kvtransfer.unequal import Pair, kv_of, layout_of

from tandem.kvtransfer import events
from tandem.protocol.errors import FailCause

SIZES = [(4, 16), (16, 4), (4, 8), (16, 8)]
CONNECTORS = ["tcp", "memory", "memory_blocks", "shm"]
BLOCKS = {4: [40, 3, 17, 9, 28, 1, 60, 33, 5, 52, 12, 44], 8: [7, 20, 2, 41, 11, 9], 16: [9, 2, 30]}
TOKENS = 43
"""Two chunks, and a last block that is not full, of whatever size."""


def blocks(size: int) -> list[int]:
    return BLOCKS[size][: -(-TOKENS // size)]


@pytest.mark.full
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("connector", [*CONNECTORS, "nixl"])
def test_every_token_lies_in_its_place(workers, connector, sizes):
    """And nothing else is written: neither cached blocks nor those of others."""
    pair = Pair(workers, make_config(kv_connector=connector), sizes)
    pair.consumer.kv_cache.fill_(1)
    mine, hit = blocks(sizes[1]), 16
    pair.hand_over("a", TOKENS, blocks(sizes[0]), mine, hit)
    found, wanted = pair.found(mine, TOKENS), kv_of("a", TOKENS, pair.layouts[0])
    assert torch.equal(found[:, :, :, hit:], wanted[:, :, :, hit:])
    untouched = [at for at in range(64) if at not in mine] + mine[: hit // sizes[1]]
    assert bool((pair.consumer.kv_cache[untouched] == 1).all())
    committed = {"role": "producer", "outcome": "committed"}
    pair.producer.until(lambda: pair.producer.metric("tandem:kv_handoffs_total", **committed))


@pytest.mark.parametrize("connector", ["tcp", "shm"])
def test_what_is_cached_up_to_the_last_token_but_one_costs_one_block(workers, connector):
    """D of small blocks takes but the end of P's last one."""
    pair = Pair(workers, make_config(kv_connector=connector), (16, 4))
    pair.hand_over("a", 40, BLOCKS[16], BLOCKS[4][:10], hit=36)
    wanted = kv_of("a", 40, pair.layouts[0])
    assert torch.equal(pair.found(BLOCKS[4][:10], 40)[:, :, :, 36:], wanted[:, :, :, 36:])
    parts = "tandem:kv_handoff_parts_total"
    pair.consumer.until(lambda: pair.consumer.metric(parts, role="consumer"))
    assert pair.consumer.metric(parts, role="consumer") == 1


def test_the_tag_of_another_block_fails_the_copy(workers):
    """Identity is of P's blocks, by P's hashes: D's own would be others."""
    pair = Pair(workers, make_config(kv_connector="shm"), (4, 16))
    key = make_key("a")
    assert pair.producer.admit(key, 16, pair.consumer.incarnation) is None
    pair.consumer.open(key, pair.producer.incarnation)
    pair.producer.service.computed(key, only([1, 2, 3, 4]), 16, Switch(done=True), [b"x" * 16] * 4)
    pair.load("a", [5])
    failed = pair.consumer.wait_for(events.LoadFailed, key)
    assert failed.cause is FailCause.IDENTITY
    assert "block 0 has the tag of another" in failed.message


def test_sizes_of_which_none_divides_the_other_are_refused_by_name(workers, caplog):
    """When the link is made, at D, which says so."""
    config = make_config()
    producer = workers(Producer, config, layout=layout_of(6))
    consumer = workers(Consumer, config, layout=layout_of(4))
    consumer.service.set_peers([producer.service.control])
    words = "block_size is 6 at the peer and 4 here; one has to divide the other"
    consumer.until(lambda: consumer.service.why_down(producer.incarnation) == words)
    assert words in caplog.text
    assert not consumer.service.peer_up(producer.incarnation)


def test_another_rank_than_the_own_is_refused_by_name(workers):
    """A slab is taken whole: what is of other heads has no place."""
    producer, consumer = workers(Producer), workers(Consumer)
    welcome = producer.service._mover.welcome

    def second(connectors):
        sliced = {"tensor_parallel_rank": 1, "tensor_parallel_size": 2}
        return msgspec.structs.replace(welcome(connectors), **sliced)

    producer.service._channel._welcome = second
    consumer.service.set_peers([producer.service.control])
    words = "the peer's KV is that of rank 1 of 2; taken over is that of rank 0 of 1"
    consumer.until(lambda: consumer.service.why_down(producer.incarnation) == words)


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)])
def test_a_link_of_too_many_pieces_goes_by_slots_and_says_why(
    workers, folder, monkeypatch, caplog, sizes
):
    """In the log, in the peer's health (and so in /debug/fleet), and in a counter."""
    monkeypatch.setattr("tandem.kvtransfer.transports.mapped.copiers.HostCopier.pieces", 7)
    pair = Pair(workers, make_config(kv_connector="auto", kv_node_folder=str(folder)), sizes)
    (health,) = pair.consumer.service.peer_health()
    pieces = 8 if sizes[0] < sizes[1] else 32
    words = f"a block of {sizes[0]} tokens there is {pieces} pieces of blocks of {sizes[1]} here"
    assert words in health.reason
    assert health.transport == "nixl"
    assert (
        f"shm fails for KV of {pair.producer.incarnation.hex()[:8]}: not by shm: {words}"
        in caplog.text
    )
    assert pair.consumer.metric("tandem:kv_links_uncut_total", connector="shm") == 1
    assert pair.consumer.metric("tandem:kv_links_uncut_total", connector="shm_agent") == 1
    pair.hand_over("a", TOKENS, blocks(sizes[0]), blocks(sizes[1]))
    wanted = kv_of("a", TOKENS, pair.layouts[0])
    assert torch.equal(pair.found(blocks(sizes[1]), TOKENS), wanted)


def test_a_connector_that_was_named_has_no_other_way(workers, monkeypatch):
    """The link stays down, with the reason."""
    monkeypatch.setattr("tandem.kvtransfer.transports.mapped.copiers.HostCopier.pieces", 7)
    config = make_config(kv_connector="shm")
    producer = workers(Producer, config, layout=layout_of(4))
    consumer = workers(Consumer, config, layout=layout_of(16))
    consumer.service.set_peers([producer.service.control])
    consumer.until(lambda: "8 pieces" in consumer.service.why_down(producer.incarnation))
    assert not consumer.service.peer_up(producer.incarnation)


def test_the_agent_copies_whole_blocks_alone(workers, node):
    """What it is asked for has one size: such ends do not go by it."""
    folder = str(node.agent.path.parent)
    config = make_config(kv_connector="shm_agent", kv_node_folder=folder)
    producer = workers(Producer, config, layout=layout_of(4))
    consumer = workers(Consumer, config, layout=layout_of(16))
    consumer.service.set_peers([producer.service.control])
    consumer.until(lambda: "at most 1 at once" in consumer.service.why_down(producer.incarnation))
