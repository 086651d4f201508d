"""Windows, soft caps, sinks, slopes and head sizes of Triton's and Gluon's attention in float64."""

import pytest
import torch
from tests.kernels import score_cases
from tests.kernels.gpu.where import DEVICE, DTYPES, HOPPER, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.attention import PagedBatch
from tandem.kernels.attention.batch import Scores, in_tiles
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill

pytestmark = NEEDS
BACKENDS = [Backend.TRITON, pytest.param(Backend.GLUON, marks=pytest.mark.skipif(
    not HOPPER, reason="requires a Hopper GPU"))]  # fmt: skip
ERROR = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 3e-6}
PAGE = size(64, 16)
DIM = size(64, 16)
HEAD_SIZES = size([32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512], [32, 80, 512])
DECODE_WINDOWS = size([1, PAGE - 3, PAGE, PAGE + 1, 3 * PAGE - 2, 100 * PAGE], [1, 3 * PAGE - 2])
CHUNK_WINDOWS = size([1, PAGE - 3, PAGE, 2 * PAGE + 7, 6 * PAGE, 100 * PAGE], [1, 2 * PAGE + 7])
RULES = [("softcap", None), ("sinks", None), ("slopes", None), ("softcap sinks slopes", PAGE + 3)]
SHAPE = {"page": PAGE, "dim": DIM, "device": DEVICE}


def check(op, case, scores, backend=Backend.TRITON):
    """Compare a call with float64, by the norm of the difference."""
    got = op(case.q, case.kv, case.batch, scores, backend=backend).double().cpu()
    want = case.want(scores)
    assert float((got - want).norm() / want.norm()) < ERROR[case.q.dtype]


def plans(case, kind):
    """Return how many plans of a kind the case's batch has."""
    return sum(isinstance(key, tuple) and key[0] == kind for key in case.batch.memo)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", DECODE_WINDOWS)
def test_decode_attends_to_its_window_only(window, dtype, backend):
    """Lengths around the borders of pages and of the window, in one batch."""
    around = [m * PAGE + d for m in (1, 3) for d in (-1, 0, 1)]
    lengths = [0, 1, window, window + 1, *around, 9 * PAGE + 5, 0]
    lengths = [min(n, 12 * PAGE) for n in lengths]
    before = torch.nan if backend == Backend.TRITON else 3.0
    case = score_cases.make(
        lengths, [1] * len(lengths), window=window, dtype=dtype, before=before, **SHAPE
    )
    check(decode, case, score_cases.rules("", window=window), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", size([1, PAGE + 1], [PAGE + 1]))
def test_a_few_queries_a_sequence_have_a_window_each(window, dtype, backend):
    """Pages are read from the first query's window on."""
    queries = [3, 1, 4, 0, 2, 4]
    lengths = [7 * PAGE, 1, 3 * PAGE + 2, 5 * PAGE, 2 * PAGE + 1, 4]
    before = torch.nan if backend == Backend.TRITON else 3.0
    case = score_cases.make(lengths, queries, window=window, dtype=dtype, before=before, **SHAPE)
    check(prefill, case, score_cases.rules("", window=window), backend)
    assert plans(case, "decode.shares")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", CHUNK_WINDOWS)
def test_chunks_attend_to_their_windows_only(window, dtype, backend):
    """Chunks after context of any length, with tiles masked at both ends or without a whole one."""
    chunks = [(70, 0), (15, 5 * PAGE + 3), (1, 3 * PAGE), (64, 6 * PAGE)]
    queries, lengths = [n for n, _ in chunks], [sum(chunk) for chunk in chunks]
    case = score_cases.make(lengths, queries, window=window, dtype=dtype, **SHAPE)
    check(prefill, case, score_cases.rules("", window=window), backend)
    assert plans(case, "prefill.tiles")


@pytest.mark.skipif(not HOPPER, reason="requires a Hopper GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("page", [16, 32, 128])
@pytest.mark.parametrize("window", [5, 100, 128, 1000])
def test_gluon_chunks_have_windows_in_pages_of_any_size(page, window, dim):
    """A tile at the window's start has pages that are not read."""
    lengths, queries = [900, 333, 131], [500, 333, 130]
    shape = {"page": page, "dim": dim, "device": DEVICE, "dtype": torch.bfloat16}
    case = score_cases.make(lengths, queries, window=window, **shape)
    check(prefill, case, score_cases.rules("", window=window), Backend.GLUON)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("names", "window"), size(RULES, RULES[-1:]))
def test_caps_sinks_and_slopes_are_those_of_float64(names, window, dtype):
    """Of decodes, short chunks and long ones; a sink counts once in a pair that is cut."""
    scores = score_cases.rules(names, window=window, device=DEVICE)
    lengths = [0, 1, 3 * PAGE + 2, 2 * PAGE, 6 * PAGE]
    shape = {"window": window, "dtype": dtype, **SHAPE}
    check(decode, score_cases.make(lengths, [1] * 5, **shape), scores)
    check(prefill, score_cases.make(lengths, [0, 1, 3, 2, 4], **shape), scores)
    check(prefill, score_cases.make(lengths, [0, 1, 3, 2, 80], **shape), scores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_heads_of_every_size(dim, dtype):
    """Padded to a power of two if they are none; float32 goes up to 256."""
    dtype = dtype if in_tiles(dim, dtype) else torch.float16
    shape = {"page": PAGE, "dim": dim, "device": DEVICE, "dtype": dtype}
    scores = score_cases.rules("")._replace(scale=dim**-0.5)
    lengths = [2 * PAGE + 1, 7, 4 * PAGE]
    for window, queries in ((None, [1, 1, 1]), (PAGE + 5, [1, 1, 1]), (PAGE + 5, [33, 7, 2])):
        op = decode if queries == [1, 1, 1] else prefill
        case = score_cases.make(lengths, queries, window=window, **shape)
        check(op, case, scores._replace(window=window))


def test_layers_with_and_without_a_window_share_a_batch():
    """Each window has a plan of its own, made once."""
    case = score_cases.make([5 * PAGE, 40], [1, 1], **SHAPE)
    for _ in range(2):
        for window in (None, PAGE, 2 * PAGE):
            check(decode, case, Scores(0.3, window))
    assert plans(case, "decode.shares") == 3


@pytest.mark.parametrize("window", [1, 20, 64, 90])
def test_shares_count_tiles_from_the_first_in_a_window(window):
    """They cover the visible tiles of every (sequence, head) once, in order."""
    from tandem.kernels.attention.decode.plan import Cut, shares_of

    tile, kv_heads, num = 16, 2, 5
    lengths, queries = [1, 70, 0, 33, 200, 16, 64], [1, 3, 1, 0, 1, 4, 1]
    case = score_cases.make(lengths, queries, window=window, device=DEVICE)
    shares, _ = shares_of(case.batch, case.kv, Cut(num, 4, tile, 8, window))
    each_pair = zip(lengths, queries, strict=True)
    firsts = [max(n - max(m, 1) - window + 1, 0) // tile for n, m in each_pair]
    counts = [max(-(-n // tile) - first, 1) for n, first in zip(lengths, firsts, strict=True)]
    units = [(s, h, t) for s, n in enumerate(counts) for h in range(kv_heads) for t in range(n)]
    each = int(shares.plan[0, 4])
    assert each * num >= len(units)
    for i, row in enumerate(shares.plan.tolist()):
        if i * each < len(units):
            s, _, t = units[i * each]
            assert tuple(row[:3]) == units[i * each]
            assert row[3] == min(each, len(units) - i * each)
            assert row[9] == firsts[s]
            block = int(case.batch.block_tables[s, firsts[s] + t]) if lengths[s] else row[8]
            assert row[8] == block


@pytest.mark.parametrize("window", [1, 30, 64, 200, 5000])
def test_tiles_are_ranked_by_the_keys_in_their_windows(window):
    """Every tile has a rank of its own, the heaviest the first, also among many equal ones."""
    from tandem.kernels.attention.prefill.plan import tiles_of

    chunks = [(70, 0), (0, 9), (300, 100), (64, 200), (1, 7), (513, 0), (130, 130), (64, 0)]
    queries, lengths = [n for n, _ in chunks], [sum(chunk) for chunk in chunks]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32).to(DEVICE)
    keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tables = torch.zeros(len(chunks), 40, dtype=torch.int32, device=DEVICE)
    batch = PagedBatch(starts, keys, tables, max(queries), max(lengths))
    tiles = tiles_of(batch, sum(queries), 64, window)
    want = {
        (start + first, n - first, cached + first, min(n + cached, cached + first + 64), s)
        for s, ((n, cached), start) in enumerate(zip(chunks, starts.tolist()[:-1], strict=True))
        for first in range(0, n, 64)
    }
    count = int(tiles.count)
    rows = [tuple(row) for row in tiles.rows[:count].tolist()]
    assert count == len(want)
    assert {(*row[:4], row[5]) for row in rows} == want
    visited = [row[3] - max(row[2] - window + 1, 0) for row in rows]
    assert visited == sorted(visited, reverse=True)
