"""Paged attention against dense attention in float64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import score_cases

from tandem.kernels import Backend, BadTensor
from tandem.kernels.attention import PagedBatch, Scores
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill


def slab_with(lens, *, block_size, kv_heads, dim, dtype=torch.float32, layers=3, seed=0):
    """A slab full of NaN but for the tokens of sequences of `lens`; with their tables and k, v."""
    torch.manual_seed(seed)
    needed = [-(-n // block_size) for n in lens]
    total = sum(needed) + 2
    kv_cache = torch.full((total, layers, 2, kv_heads, block_size, dim), torch.nan, dtype=dtype)
    order = torch.randperm(total).tolist()
    tables = torch.full((len(lens), max(needed, default=0) + 1), 10**6, dtype=torch.int32)
    keys, values = [], []
    for s, length in enumerate(lens):
        k = torch.randn(length, kv_heads, dim, dtype=dtype)
        v = torch.randn(length, kv_heads, dim, dtype=dtype)
        for b in range(needed[s]):
            tables[s, b] = block = order.pop()
            part = slice(b * block_size, min(length, (b + 1) * block_size))
            kv_cache[block, 1, 0, :, : part.stop - part.start] = k[part].transpose(0, 1)
            kv_cache[block, 1, 1, :, : part.stop - part.start] = v[part].transpose(0, 1)
        keys.append(k)
        values.append(v)
    return kv_cache[:, 1], tables, keys, values


def batch_of(query_lens, lens, tables):
    """The batch of sequences with these queries and keys."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return PagedBatch(
        cu_seqlens_q=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_tables=tables,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(lens, default=0),
    ).check()


def dense(q, k, v, scale):
    """Attention of the last queries over all keys, in float64."""
    group = q.shape[1] // k.shape[1]
    k = k.double().repeat_interleave(group, 1)
    v = v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    hidden = torch.arange(k.shape[0]) > torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    scores = scores.masked_fill(hidden, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(op, query_lens, lens, *, block_size=16, heads=6, kv_heads=2, dim=16, dtype=torch.float32):
    """Hold `op` to dense attention for every sequence of the batch."""
    kv, tables, keys, values = slab_with(
        lens, block_size=block_size, kv_heads=kv_heads, dim=dim, dtype=dtype
    )
    q = torch.randn(sum(query_lens), heads + 3, dim, dtype=dtype)[:, :heads]
    got = op(q, kv, batch_of(query_lens, lens, tables), Scores(0.3))
    assert got.shape == q.shape
    assert got.dtype == dtype
    start = 0
    for queries, k, v in zip(query_lens, keys, values, strict=True):
        want = dense(q[start : start + queries], k, v, 0.3)
        gap = (got[start : start + queries].double() - want).abs().max()
        assert gap < TOLERANCE[dtype] * 4
        start += queries


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=5),
    st.sampled_from([1, 3]),
    st.sampled_from([16, 32]),
)
def test_prefill_of_ragged_chunks_over_cached_context(chunks, group, block_size):
    """Chunks of any length over any context equal dense causal attention, whatever unused KV is."""
    queries = [n for n, _ in chunks]
    lens = [n + cached for n, cached in chunks]
    check(prefill, queries, lens, heads=2 * group, block_size=block_size)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.sampled_from([16, 64]))
def test_decode_of_ragged_lengths(lens, block_size):
    """One query a sequence sees its own keys alone, however lengths are mixed."""
    check(decode, [1] * len(lens), lens, block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "queries"), [(prefill, [5, 33]), (decode, [1, 1])])
def test_attention_in_every_dtype(op, queries, dtype):
    """Half precisions stay within their rounding."""
    check(op, queries, [40, 90], dtype=dtype)


@pytest.mark.parametrize("dim", [4, 8, 20, 264])
@pytest.mark.parametrize(
    ("op", "queries"), [(prefill, [5, 33]), (prefill, [1, 2]), (decode, [1, 1])]
)
def test_heads_that_no_matrix_unit_takes_are_the_references(dim, op, queries):
    """On a GPU too: the kernels would not compile for them, or have no tiles of such a size."""
    for backend in (Backend.TRITON, Backend.GLUON):
        check(partial(op, backend=backend), queries, [5, 37], dim=dim)


@pytest.mark.parametrize("op", [prefill, decode])
def test_an_empty_batch_gives_nothing(op):
    """No sequences is a batch like any other."""
    kv, tables, _, _ = slab_with([], block_size=16, kv_heads=2, dim=16)
    out = op(torch.empty(0, 6, 16), kv, batch_of([], [], tables), Scores(1.0))
    assert out.shape == (0, 6, 16)


def test_layers_share_what_was_planned():
    """The second layer's call finds the plan of the first in the batch."""
    kv, tables, _, _ = slab_with([30, 20], block_size=16, kv_heads=2, dim=16)
    batch = batch_of([1, 1], [30, 20], tables)
    q = torch.randn(2, 4, 16)
    first = decode(q, kv, batch, Scores(1.0))
    planned = dict(batch.memo)
    again = decode(q, kv, batch, Scores(1.0))
    assert batch.memo == planned
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q, kv: (q[:, :5], kv), "5 heads"),
        (lambda q, kv: (q.bfloat16(), kv), "bfloat16"),
        (lambda q, kv: (q[:, :, :], kv.transpose(3, 2)[:, :, :2]), "strides"),
        (lambda q, kv: (q[..., ::2], kv[..., ::2]), "stride"),
        (lambda q, kv: (q, kv[..., :8]), "shape"),
    ],
)
def test_bad_tensors_are_named(change, said):
    """What does not fit is refused with the name and the value."""
    kv, tables, _, _ = slab_with([30, 20], block_size=16, kv_heads=2, dim=16)
    q, kv = change(torch.randn(2, 6, 16), kv)
    with pytest.raises(BadTensor, match=said):
        decode(q, kv, batch_of([1, 1], [30, 20], tables), Scores(1.0))


def test_a_table_too_short_is_refused():
    """max_seq_len must fit the block table."""
    kv, tables, _, _ = slab_with([30], block_size=16, kv_heads=2, dim=16)
    with pytest.raises(BadTensor, match="block_tables"):
        prefill(torch.randn(30, 6, 16), kv, batch_of([30], [30], tables[:, :1]), Scores(1.0))


def test_decode_refuses_chunks():
    """More than one query a sequence is prefill's work."""
    kv, tables, _, _ = slab_with([30], block_size=16, kv_heads=2, dim=16)
    with pytest.raises(BadTensor, match="max_query_len"):
        decode(torch.randn(1, 6, 16), kv, batch_of([2], [30], tables), Scores(1.0))


@pytest.mark.parametrize("names", ["", "softcap", "sinks", "slopes", "softcap sinks slopes"])
@pytest.mark.parametrize("window", [None, 1, 13, 16, 17, 70, 500])
def test_every_rule_of_scores_is_that_of_float64(names, window):
    """Decodes of unlike lengths and chunks after context; freed pages are NaN, entries wild."""
    scores = score_cases.rules(names, window=window)
    lengths = [1, 200, 15, 16, 17, 90, 31, 300]
    for op, queries in ((decode, [1] * 8), (prefill, [1, 40, 15, 3, 0, 90, 16, 1])):
        case = score_cases.make(lengths, queries, window=window)
        for _ in range(2):  # also from the plan of the first
            got = op(case.q, case.kv, case.batch, scores).double()
            assert (got - case.want(scores)).abs().max() < 1e-5


def test_scores_in_parts_are_those_of_the_whole(monkeypatch):
    """Long chunks are scored a few queries at a time."""
    scores = score_cases.rules("softcap sinks slopes", window=50)
    case = score_cases.make([130], [90], window=50)
    monkeypatch.setattr("tandem.kernels.attention.softmax.ELEMENTS", 7 * 4 * 139)
    got = prefill(case.q, case.kv, case.batch, scores).double()
    assert (got - case.want(scores)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"window": 0}, "window is 0, expected at least 1"),
        ({"softcap": 0.0}, "softcap is 0.0, expected above 0"),
        ({"softcap": torch.nan}, "softcap is nan"),
        ({"sinks": torch.zeros(2)}, r"sinks has shape \(2,\), expected \(6\)"),
        ({"sinks": torch.zeros(6, dtype=torch.float16)}, "sinks is torch.float16"),
        ({"slopes": torch.zeros(12)[::2]}, "slopes has stride 2"),
        ({"slopes": torch.zeros(6, device="meta")}, "slopes is on meta, but q is on cpu"),
    ],
)
@pytest.mark.parametrize("op", [prefill, decode])
def test_rules_that_do_not_fit_are_refused(op, change, text):
    """The error names the rule and its value."""
    kv, tables, _, _ = slab_with([30], block_size=16, kv_heads=2, dim=16)
    with pytest.raises(BadTensor, match=text):
        op(torch.randn(1, 6, 16), kv, batch_of([1], [30], tables), Scores(1.0, **change))
