"""The plan of decode attention, and the Hopper kernel against float64: lengths, rows, pages."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.gpu.test_triton_attention import ERROR, dense, gap
from tests.kernels.gpu.where import DEVICE, HOPPER, NEEDS

from tandem.kernels import Backend
from tandem.kernels.attention import PagedBatch, Scores
from tandem.kernels.attention.decode import decode
from tandem.kernels.rotary_kv import Rotation, SlotMapping, rotary_kv

pytestmark = NEEDS
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")

SCALE = 0.1
RAGGED = [1, 700, 64, 65, 2100, 0, 5]
MIXES = {
    "one": [512],
    "ragged": RAGGED,
    "empty": [0, 300, 0],
    "edges": [63, 64, 65, 127, 128, 129, 0, 1, 2, 191, 192, 193] * 6,
    "many": [37 * i % 400 for i in range(300)],
    "long": list(range(30, 6000, 190)),
}


@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.parametrize("lengths", [[40], [1, 70, 0, 0, 33, 200, 16], [5] * 9], ids=str)
def test_shares_cover_every_unit_once(lengths, pieces):
    """Each starts where the one before ended; those behind the last unit are empty."""
    from tandem.kernels.attention.decode.plan import Cut, shares_of

    tile, kv_heads, num = 16, 2, 5
    kv = torch.empty(64, 2, kv_heads, tile, 16, device=DEVICE)
    tables = torch.arange(len(lengths) * 13, dtype=torch.int32, device=DEVICE) % 64
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device=DEVICE)
    keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(starts, keys, tables.view(len(lengths), 13), 1, max(lengths))
    shares, planned = shares_of(batch, kv, Cut(num, 4, tile, pieces))
    assert not planned
    assert shares_of(batch, kv, Cut(num, 4, tile, pieces))[1]
    counts = [max(1, -(-n // tile)) for n in lengths]
    units = [(s, h, t) for s, n in enumerate(counts) for h in range(kv_heads) for t in range(n)]
    each = int(shares.plan[0, 4])
    assert each * num >= len(units)
    for i, row in enumerate(shares.plan.tolist()):
        assert row[3] == min(each, len(units) - i * each) or row[3] <= 0 >= len(units) - i * each
        if row[3] > 0:
            seq, _, unit = units[i * each]
            assert tuple(row[:3]) == units[i * each]
            assert row[5:9] == [lengths[seq], seq, 1, int(batch.block_tables[seq, unit])]
    assert not shares.arrivals[..., 0].any()


def paged(lengths, queries, dtype, *, kv_heads=8, group=4, dim=128, page=64, layers=2):
    """A slab that is NaN wherever no token is, queries among other heads, wild table ends."""
    torch.manual_seed(len(lengths))
    needed = [-(-n // page) for n in lengths]
    size = (sum(needed) + 2, layers, 2, kv_heads, page, dim)
    kv_cache = torch.full(size, torch.nan, dtype=dtype, device="cuda")
    order = torch.randperm(size[0]).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    for s, n in enumerate(lengths):
        for b in range(needed[s]):
            tables[s, b] = block = order.pop()
            kv_cache[block, :, :, :, : min(page, n - b * page)].normal_()
    heads = kv_heads * group
    q = torch.randn(sum(queries), heads + 2 * kv_heads, dim, device="cuda").to(dtype)[:, :heads]
    batch = PagedBatch(
        torch.tensor([0, *queries]).cumsum(0).to(torch.int32).cuda(),
        torch.tensor(lengths, dtype=torch.int32).cuda(),
        tables.cuda(),
        max(queries),
        max(lengths),
    )
    return q, kv_cache, batch


def launched(q, kv, batch, **tuning):
    """What the kernel itself leaves in a poisoned tensor, whatever would be selected."""
    from tandem.kernels.attention.decode import gluon

    out = torch.full(q.shape, torch.nan, dtype=q.dtype, device="cuda")
    gluon.launch(q, kv, batch, Scores(SCALE), out, replace(gluon.DEFAULT, **tuning))
    return out


@hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES.keys())
def test_decode_agrees_with_float64(lengths, dtype):
    """Whole and cut pairs, tails of pages unread, empty sequences zero; again and again."""
    q, kv_cache, batch = paged(lengths, [1] * len(lengths), dtype)
    want = dense(q, kv_cache[:, 1], batch, SCALE)
    for _ in range(3):
        assert gap(launched(q, kv_cache[:, 1], batch), want) < ERROR[dtype]


@hopper
@pytest.mark.parametrize(
    "shape",
    [
        {"dim": 64},
        {"group": 7, "kv_heads": 4},
        {"group": 8, "kv_heads": 1},
        {"group": 16, "kv_heads": 2, "page": 128},
    ],
    ids=str,
)
def test_heads_and_pages_of_other_sizes(shape):
    """Groups that are no power of two, one KV head, two tiles a page."""
    q, kv_cache, batch = paged(RAGGED * 3, [1] * 21, torch.bfloat16, **shape)
    got = launched(q, kv_cache[:, 0], batch)
    assert gap(got, dense(q, kv_cache[:, 0], batch, SCALE)) < ERROR[torch.bfloat16]


@hopper
def test_a_few_queries_a_sequence():
    """Ragged and causal among themselves, some of them over a border of tiles."""
    lengths, queries = [900, 4, 400, 64, 1300, 66, 130] * 4, [3, 1, 4, 0, 2, 4, 4] * 4
    q, kv_cache, batch = paged(lengths, queries, torch.bfloat16)
    got = launched(q, kv_cache[:, 1], batch)
    assert gap(got, dense(q, kv_cache[:, 1], batch, SCALE)) < ERROR[torch.bfloat16]


@hopper
def test_ragged_batches_are_those_of_the_plain_kernel():
    """Sequences of any length, a row over no key among them, which is zero."""
    from tandem.kernels.attention.decode import triton

    q, kv_cache, batch = paged(RAGGED * 2, [1] * 14, torch.bfloat16)
    want = torch.empty(q.shape, dtype=q.dtype, device="cuda")
    triton.launch(q, kv_cache[:, 1], batch, Scores(SCALE), want, triton.DEFAULT)
    assert gap(launched(q, kv_cache[:, 1], batch), want.double().cpu()) < ERROR[torch.bfloat16]


@hopper
@pytest.mark.parametrize("lengths", [[1024] * 16, [17 * i % 700 + 1 for i in range(40)]], ids=len)
def test_no_ring_is_filled_with_what_the_kernel_ahead_still_writes(lengths):
    """Layer by layer in a graph, each one's newest keys and values written just before it."""
    layers, n = 8, len(lengths)
    _, kv_cache, batch = paged(lengths, [1] * n, torch.bfloat16, layers=layers)
    last = torch.tensor(lengths).cuda() - 1
    slot_mapping = SlotMapping(batch.block_tables[torch.arange(n), last // 64].long(), last % 64)
    rotation = Rotation(*torch.rand(2, n, 128, device="cuda").to(torch.bfloat16))
    kv_cache[slot_mapping.blocks, :, :, :, slot_mapping.offsets] = torch.nan
    before = kv_cache.clone()
    rows = torch.randn(layers, n, 48, 128, dtype=torch.bfloat16, device="cuda")

    def run():
        step = replace(batch, memo={})
        queries, outs = [], []
        for i, x in enumerate(rows):
            queries.append(rotary_kv(x, kv_cache[:, i], rotation, slot_mapping))
            outs.append(launched(queries[-1], kv_cache[:, i], step))
        return queries, outs

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries, outs = run()
    for _ in range(3):
        kv_cache.copy_(before)
        rows.normal_()
        graph.replay()
        for i, (q, out) in enumerate(zip(queries, outs, strict=True)):
            assert gap(out, dense(q, kv_cache[:, i], batch, SCALE)) < ERROR[torch.bfloat16]


@hopper
def test_one_graph_serves_any_lengths():
    """Other lengths and tables on the device, other answers; rows of padding have no page."""
    q, kv_cache, batch = paged([3000, 100, 700] * 4, [1] * 12, torch.bfloat16)
    decode(q, kv_cache[:, 1], batch, Scores(SCALE))
    batch.memo.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, kv_cache[:, 1], batch, Scores(SCALE), backend=Backend.GLUON)
    tables = batch.block_tables.clone()
    for lengths in ([3000, 100, 700], [64, 90, 1], [2999, 0, 650]):
        batch.seq_lens.copy_(torch.tensor(lengths * 4))
        batch.block_tables.copy_(tables)
        batch.block_tables[batch.seq_lens == 0] = 2**30
        out.fill_(torch.nan)
        graph.replay()
        assert gap(out, dense(q, kv_cache[:, 1], batch, SCALE)) < ERROR[torch.bfloat16]
