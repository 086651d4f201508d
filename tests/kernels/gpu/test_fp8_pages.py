"""Pages of e4m3 codes in Triton's and Gluon's kernels: against float64 over codes times scales."""

import pytest
import torch
from tests.kernels import code_cases, score_cases
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, HOPPER, NEEDS, size

from tandem.kernels import Backend
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill
from tandem.kernels.narrow.codes import to_codes
from tandem.kernels.rotary_kv import QKNorm, rotary_kv

pytestmark = [
    *NEEDS,
    pytest.mark.skipif(
        GPU and torch.cuda.get_device_capability() < (8, 9), reason="requires e4m3 in hardware"
    ),
]
BACKENDS = [Backend.TRITON, pytest.param(Backend.GLUON, marks=pytest.mark.skipif(
    not HOPPER, reason="requires a Hopper GPU"))]  # fmt: skip
ERROR = {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 3e-6}
PAGE = size(64, 16)
DIM = size(64, 16)
EVERY = list(dict.fromkeys((*DTYPES, torch.float16)))
RULES = [("", None), ("", PAGE + 3), ("softcap sinks slopes", None), ("sinks", 2 * PAGE - 1)]
UNUSED = size(code_cases.NAN, code_cases.ONE)  # the interpreter has no codes of NaN
SHAPE = {"page": PAGE, "dim": DIM, "device": DEVICE}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize(("names", "window"), RULES)
def test_decodes_and_chunks_attend_to_codes_times_scales(names, window, dtype, backend):
    """Scales differ between K and V and between heads; no sum is rounded to fewer bits."""
    scores = score_cases.rules(names, window=window, device=DEVICE)
    lengths = [0, 1, 3 * PAGE + 2, 2 * PAGE, 6 * PAGE]
    for op, queries in (
        (decode, [1] * 5),
        (prefill, [0, 1, 3, 2, 4]),
        (prefill, [0, 1, 3, 2, 80]),
    ):
        case = code_cases.make(lengths, queries, window=window, dtype=dtype, unused=UNUSED, **SHAPE)
        got = op(case.q, case.kv, case.batch, scores, case.scales, backend=backend).double().cpu()
        want = case.want(scores)
        assert float((got - want).norm() / want.norm()) < ERROR[dtype]


@pytest.mark.parametrize("dim", size([24, 64, 80, 128, 256, 512], [24, 80]))
def test_heads_of_every_size_have_codes(dim):
    """Also of sizes that are not a power of two."""
    scores = score_cases.rules("")._replace(scale=dim**-0.5)
    for op, queries in ((decode, [1, 1]), (prefill, [40, 2])):
        case = code_cases.make(
            [3 * PAGE, 7], queries, dtype=DTYPES[0] if GPU else torch.float32,
            page=PAGE, dim=dim, device=DEVICE,
        )  # fmt: skip
        got = op(case.q, case.kv, case.batch, scores, case.scales, backend=Backend.TRITON)
        want = case.want(scores)
        assert float((got.double().cpu() - want).norm() / want.norm()) < ERROR[case.q.dtype]


@pytest.mark.skipif(not HOPPER, reason="requires a Hopper GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100])
def test_gluon_decodes_of_any_length_have_codes(dim, group, dtype, window):
    """Whole and cut pairs, tails of pages that hold NaN codes, empty sequences."""
    from tandem.kernels.attention.decode import gluon

    lengths = [1, 700, 64, 65, 2100, 0, 5, *range(30, 3000, 190)]
    case = code_cases.make(
        lengths, [1] * len(lengths), window=window, dtype=dtype, page=64, dim=dim,
        heads=2 * group, device=DEVICE,
    )  # fmt: skip
    scores = score_cases.rules("", window=window)
    assert gluon.takes(case.q, case.kv, case.batch, scores)
    out = torch.full_like(case.q, torch.nan)
    want = case.want(scores)
    for _ in range(3):
        gluon.launch(case.q, case.kv, case.batch, scores, out, gluon.DEFAULT, case.scales)
        assert float((out.double().cpu() - want).norm() / want.norm()) < ERROR[dtype]


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dim", size([64, 80, 128], [16, 80]))
def test_new_keys_and_values_are_the_codes_of_what_plain_pages_get(dim, norm, dtype):
    """Numbers beyond 448 times the scale saturate; other slots keep their bytes.

    The interpreter does not round to nearest, so there the numbers are codes times scales.
    """
    call = code_cases.rotary_call(dim=dim, dtype=dtype, device=DEVICE, exact=not GPU)
    qk_norm = None
    if norm:
        q_weight, k_weight = torch.rand(2, dim, device=DEVICE).to(dtype)
        qk_norm = QKNorm(q_weight, k_weight, 1e-6)
    plain = call.kv.new_zeros(call.kv.shape, dtype=dtype)
    wanted = rotary_kv(
        call.qkv.clone(), plain, call.rotation, call.slots, qk_norm, backend=Backend.TRITON
    )
    codes = call.kv.clone()
    found = rotary_kv(
        call.qkv.clone(), codes, call.rotation, call.slots, qk_norm, call.scales,
        backend=Backend.TRITON,
    )  # fmt: skip
    assert torch.equal(found, wanted)
    rounded = to_codes(plain, call.scales[:, :, None, None])
    parts = slice(None) if GPU or not norm else slice(1, None)  # normed keys are not codes
    at = call.slots.blocks, parts, slice(None), call.slots.offsets
    assert torch.equal(codes.view(torch.uint8)[at], rounded[at])
    touched = torch.zeros(call.kv.shape, dtype=torch.bool, device=DEVICE)
    touched[call.slots.blocks, :, :, call.slots.offsets] = True
    untouched = ~touched
    before, after = call.kv.view(torch.uint8), codes.view(torch.uint8)
    assert torch.equal(after[untouched], before[untouched])
