"""KV of n ranks into the slabs of m, by head slices: real slabs, mapped and copied as ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kvtransfer.mapped.test_mapped import ended
from tests.kvtransfer.mapped.worker import KEY

from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.memory.slots import SharedSlots
from tandem.kvtransfer.transports.base import End, Progress, part_extents
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.transports.mapped.transport import MappedTransport
from tandem.memory.shared import shared_tensor
from tandem.protocol.card import KVGroup, KVKind, Shard, blocks_for
from tandem.protocol.ids import new_incarnation

pytestmark = pytest.mark.full

HEADS, LAYERS, WIDTH, TOKENS = 8, 3, 16, 43
NUM_BLOCKS = 16
THEIRS = {8: [9, 2, 14, 5, 11, 3], 16: [7, 1, 12]}
MINE = {8: [4, 13, 6, 1, 15, 8], 16: [3, 10, 2]}


class Rank:
    """A slab with a rank's heads of each layer, and the transport that reaches it."""

    def __init__(self, folder: Path, shard: Shard, block_size: int) -> None:
        self.shard, self.block_size = shard, block_size
        self.group = KVGroup(
            num_layers=LAYERS,
            num_kv_heads=HEADS // shard.size,
            head_dim=WIDTH,
            block_size=block_size,
            dtype="bfloat16",
        )
        self.end = End(block_size, self.group.block_bytes, shard)
        self.incarnation = new_incarnation()
        memory = shared_tensor(NUM_BLOCKS * self.group.block_bytes).view(NUM_BLOCKS, -1)
        self.kv_cache = memory.fill_(0)
        self.tags = SharedTags(NUM_BLOCKS)
        self.slots = SharedSlots(1, 4096)
        self.transport = MappedTransport(
            "shm", self.incarnation, HostCopier(), folder, on_gpu=False
        )
        self.blocks = Blocks(self.kv_cache, self.tags)

    def at(self, blocks: list[int], token: int) -> torch.Tensor:
        """[layer, K|V, head, head_dim] of one token, in the slab."""
        shape = (NUM_BLOCKS, *self.group.block_shape)
        numbers = self.kv_cache.view(torch.bfloat16).view(shape)
        return numbers[blocks[token // self.block_size], :, :, :, token % self.block_size]


@pytest.fixture
def ranks(folder):
    """``ranks(how many, block size)``; all are stopped at the end."""
    made: list[Rank] = []

    def make(size: int, block_size: int) -> list[Rank]:
        found = [Rank(folder, Shard(rank, size), block_size) for rank in range(size)]
        made.extend(found)
        return found

    yield make
    for rank in made:
        rank.transport.stop()


@pytest.mark.parametrize("block_sizes", [(16, 16), (8, 16), (16, 8)])
@pytest.mark.parametrize("m", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_head_of_every_token_lies_in_its_place(ranks, n, m, block_sizes):
    """D's rank j reads of each of P's ranks the heads that both have."""
    senders, takers = ranks(n, block_sizes[0]), ranks(m, block_sizes[1])
    theirs, mine = THEIRS[block_sizes[0]], MINE[block_sizes[1]]
    kv = torch.randn((TOKENS, LAYERS, 2, HEADS, WIDTH)).to(torch.bfloat16)
    cards = {}
    used = theirs[: blocks_for(TOKENS, block_sizes[0])]
    for rank in senders:
        heads = rank.shard.heads(HEADS)
        for token in range(TOKENS):
            rank.at(theirs, token)[:] = kv[token][:, :, heads.start : heads.stop]
        for at, block in enumerate(used):
            rank.tags.set(KEY, block, bytes([rank.shard.rank + 1, at]) * 8)
        cards[rank.incarnation] = rank.transport.serve(rank.slots, rank.blocks)
    for taker in takers:
        taker.transport.receive(taker.slots, taker.blocks)
        for rank in senders:
            if not set(rank.shard.heads(HEADS)) & set(taker.shard.heads(HEADS)):
                continue
            taker.transport.connect(rank.incarnation, "127.0.0.1", cards[rank.incarnation])
            blocks = (mine[: blocks_for(TOKENS, taker.block_size)], used)
            extents = part_extents(*blocks, 0, TOKENS, taker.group, taker.end, rank.end)
            ticket = taker.transport.read(rank.incarnation, extents)
            assert ended(taker.transport, ticket) is Progress.DONE
            tags = [bytes([rank.shard.rank + 1, at]) * 8 for at in range(len(used))]
            assert taker.transport.tags_of(ticket) == b"".join(tags)
    for taker in takers:
        heads = taker.shard.heads(HEADS)
        for token in range(TOKENS):
            found = taker.at(mine, token)
            assert torch.equal(found, kv[token][:, :, heads.start : heads.stop])
        others = [at for at in range(NUM_BLOCKS) if at not in mine]
        assert not bool(taker.kv_cache[others].any())


def test_a_rank_reads_whole_latents_of_any_rank():
    """A row for each layer: no V, no heads."""
    group = KVGroup(
        num_layers=LAYERS,
        num_kv_heads=1,
        head_dim=WIDTH,
        block_size=8,
        dtype="bfloat16",
        kind=KVKind.LATENT,
    )
    row = 8 * WIDTH * 2
    assert group.block_bytes == LAYERS * row
    mine = End(8, group.block_bytes, Shard(1, 2))
    theirs = End(16, 2 * group.block_bytes, Shard(0, 4))
    extents = part_extents([4, 6], [5], 0, 16, group, mine, theirs)
    assert extents.nbytes == row
    pairs = [(each.local.offset // row, each.remote.offset // row) for each in extents[:]]
    assert pairs == [(12, 30), (13, 32), (14, 34), (18, 31), (19, 33), (20, 35)]


def test_whose_heads_a_rank_has():
    assert [list(Shard(rank, 2).heads(6)) for rank in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
