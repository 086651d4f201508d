"""Attention kernels against float64, on a GPU or, small, in Triton's interpreter on a CPU.

Skipped where there is neither; tests/kernels/test_interpreted.py runs this file interpreted.
"""

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, HOPPER, INTERPRETED, NEEDS

from tandem.kernels import Backend
from tandem.kernels.attention import PagedBatch, Scores
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill

PREFILL_BACKENDS = [Backend.TRITON, pytest.param(Backend.GLUON, marks=pytest.mark.skipif(
    not HOPPER, reason="needs a Hopper GPU"))]  # fmt: skip
ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-6}
EVERY = list(dict.fromkeys((*DTYPES, torch.float32)))
HEADS, KV_HEADS, DIM, PAGE = (16, 4, 128, 64) if GPU else (4, 2, 16, 16)

pytestmark = NEEDS


def sizes(*tokens):
    """Lengths for a GPU, cut down to a few pages for the interpreter."""
    return list(tokens) if GPU else [-(-t // 16) if t > 8 else t for t in tokens]


def paged(lengths, queries, dtype, *, page=PAGE, heads=HEADS, layers=2, seed=0):
    """A batch over a slab that is NaN wherever no token is, with garbage behind its tables."""
    torch.manual_seed(seed)
    needed = [-(-n // page) for n in lengths]
    total = sum(needed) + 2
    kv_cache = torch.full((total, layers, 2, KV_HEADS, page, DIM), torch.nan, dtype=dtype)
    order = torch.randperm(total).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 2**30, dtype=torch.int32)
    for s, n in enumerate(lengths):
        for b in range(needed[s]):
            tables[s, b] = block = order.pop()
            kv_cache[block, :, :, :, : min(page, n - b * page)] = torch.randn(
                layers, 2, KV_HEADS, min(page, n - b * page), DIM
            ).to(dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    q = torch.randn(sum(queries), heads + 2 * KV_HEADS, DIM).to(dtype).to(DEVICE)[:, :heads]
    batch = PagedBatch(
        starts.to(DEVICE),
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
        tables.to(DEVICE),
        max(queries),
        max(lengths),
    )
    return q, kv_cache.to(DEVICE)[:, 1], batch


def dense(q, kv, batch, scale):
    """The answer in float64, sequence by sequence; zero where a sequence has no key."""
    want = torch.zeros(q.shape, dtype=torch.float64)
    starts, group = batch.cu_seqlens_q.tolist(), q.shape[1] // kv.shape[2]
    for s, n in enumerate(batch.seq_lens.tolist()):
        a, b = starts[s], starts[s + 1]
        if n and b > a:
            blocks = batch.block_tables[s, : -(-n // kv.shape[3])].long()
            k, v = kv[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :n].double().cpu()
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
            scores = torch.einsum("qhd,hkd->hqk", q[a:b].double().cpu(), k) * scale
            hidden = torch.arange(n) > torch.arange(n - (b - a), n)[:, None]
            p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            want[a:b] = torch.einsum("hqk,hkd->qhd", p, v)
    return want


def gap(got, want):
    """||got - want|| / ||want||; NaN anywhere gives NaN, which no bound admits."""
    return float((got.double().cpu() - want).norm() / want.norm())


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    "lengths",
    [(512,), (1, 700, 64, 65, 2100), (0, 300, 0), tuple(range(30, 3000, 190 if GPU else 390))],
    ids=["one", "ragged", "empty", "many"],
)
def test_decode_agrees_with_float64(lengths, dtype):
    """One query a sequence: lengths of any mix, empty sequences zero, tails of pages unread."""
    lengths = sizes(*lengths)
    q, kv, batch = paged(lengths, [1] * len(lengths), dtype)
    got = decode(q, kv, batch, Scores(0.1), backend=Backend.TRITON)
    assert gap(got, dense(q, kv, batch, 0.1)) < ERROR[dtype]


@pytest.mark.parametrize("dtype", EVERY)
def test_a_planned_batch_serves_every_layer_and_every_repeat(dtype):
    """The counters of cut pairs are zero again after a launch, and the plan is made once."""
    q, kv, batch = paged(sizes(900, 40, 1800), [1] * 3, dtype)
    first = decode(q, kv, batch, Scores(0.1), backend=Backend.TRITON)
    assert sum(key[0] == "decode.shares" for key in batch.memo) == 1
    for _ in range(3):
        assert torch.equal(decode(q, kv, batch, Scores(0.1), backend=Backend.TRITON), first)


@pytest.mark.parametrize("dtype", EVERY)
def test_a_few_queries_a_sequence_go_through_the_decode_kernel(dtype):
    """Speculation: up to SHORT_ROWS rows, ragged, causal among themselves."""
    queries = [3, 1, 4, 0, 2]
    q, kv, batch = paged(sizes(900, 1, 400, 64, 1300), queries, dtype)
    got = prefill(q, kv, batch, Scores(0.1), backend=Backend.TRITON)
    assert any(key[0] == "decode.shares" for key in batch.memo)
    assert gap(got, dense(q, kv, batch, 0.1)) < ERROR[dtype]


@pytest.mark.parametrize("backend", PREFILL_BACKENDS)
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(
    "chunks",
    [
        ((700, 0),),
        ((1024, 1024),),
        ((300, 36), (129, 0), (1, 777), (640, 640), (0, 60), (65, 63)),
        ((500, 100), (257, 1001), (400, 8)),
    ],
    ids=["alone", "whole tiles", "mix", "ragged"],
)
def test_prefill_agrees_with_float64(chunks, dtype, backend):
    """Prompts and chunks after cached context, of any length, several in one launch."""
    queries, cached = (sizes(*part) for part in zip(*chunks, strict=True))
    lengths = [a + b for a, b in zip(queries, cached, strict=True)]
    if INTERPRETED:
        queries[0] += 40  # too many rows for the decode kernel
        lengths[0] += 40
    q, kv, batch = paged(lengths, queries, dtype)
    got = prefill(q, kv, batch, Scores(0.1), backend=backend)
    assert any(key[0] == "prefill.tiles" for key in batch.memo)
    assert gap(got, dense(q, kv, batch, 0.1)) < ERROR[dtype]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("page", [16, 32, 128])
def test_gluon_prefill_takes_pages_of_any_size(page):
    """A tile is gathered from 1 to 8 pages."""
    q, kv, batch = paged([900, 333], [500, 333], torch.bfloat16, page=page)
    got = prefill(q, kv, batch, Scores(0.1), backend=Backend.GLUON)
    assert gap(got, dense(q, kv, batch, 0.1)) < ERROR[torch.bfloat16]


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_one_graph_serves_any_lengths():
    """A captured decode reads lengths and tables on the device: other ones, other answers."""
    q, kv, batch = paged([3000, 100, 700], [1] * 3, torch.bfloat16)
    decode(q, kv, batch, Scores(0.1))
    batch.memo.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, kv, batch, Scores(0.1))
    for lengths in ([3000, 100, 700], [64, 90, 1], [2999, 0, 650]):
        batch.seq_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        assert gap(out, dense(q, kv, batch, 0.1)) < ERROR[torch.bfloat16]
