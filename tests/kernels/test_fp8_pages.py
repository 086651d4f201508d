"""Pages of e4m3 codes in plain torch: attention over codes times scales, and rounding to codes."""

import pytest
import torch
from tests.kernels import code_cases, score_cases

from tandem.kernels import BadTensor
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill
from tandem.kernels.narrow import decode as read_codes
from tandem.kernels.narrow import encode
from tandem.kernels.narrow.codes import from_codes, to_codes
from tandem.kernels.rotary_kv import rotary_kv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("names", ["", "softcap", "softcap sinks slopes"])
@pytest.mark.parametrize("window", [None, 1, 13, 70])
def test_codes_times_scales_are_attended_to(names, window, dtype):
    """Scales differ between K and V and between heads; unused codes are NaN."""
    scores = score_cases.rules(names, window=window)
    lengths = [1, 200, 15, 16, 17, 90]
    for op, queries in ((decode, [1] * 6), (prefill, [1, 40, 15, 3, 0, 90])):
        case = code_cases.make(lengths, queries, window=window, dtype=dtype)
        got = op(case.q, case.kv, case.batch, scores, case.scales)
        assert got.dtype == dtype
        gap = (got.double() - case.want(scores)).abs().max()
        assert gap < (1e-5 if dtype is torch.float32 else 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_is_exact_in_every_type(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    want = codes.view(torch.float8_e4m3fn).to(dtype)
    number = ~want.isnan()
    assert torch.equal(from_codes(codes, dtype)[number], want[number])


def test_numbers_are_rounded_to_the_nearest_code_ties_to_even_and_saturate():
    """Ties are midway between two codes; infinities and numbers beyond 448 become 448."""
    positive = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = torch.cat((positive, (positive[1:] + positive[:-1]) / 2, torch.tensor([449.0, 1e30])))
    numbers = torch.cat((numbers, torch.tensor([torch.inf]))).double()
    gaps = (numbers.clamp(max=448)[:, None] - positive[None, :]).abs()
    nearest = gaps == gaps.amin(1, keepdim=True)
    even = torch.arange(127) % 2 == 0
    only = nearest.sum(1, keepdim=True) == 1
    want = (nearest & (only | even)).int().argmax(1).to(torch.uint8)
    for scale in (1.0, 0.25):
        for sign, bit in ((1, 0), (-1, 0x80)):
            got = to_codes((sign * numbers * scale).float(), torch.tensor(scale))
            assert torch.equal(got, want + bit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_keys_and_values_are_the_codes_of_what_plain_pages_get(dtype):
    """Those of qkv's type, after the rotation; other slots keep their bytes."""
    call = code_cases.rotary_call(dim=16, dtype=dtype)
    plain, codes = call.kv.new_zeros(call.kv.shape, dtype=dtype), call.kv.clone()
    wanted = rotary_kv(call.qkv.clone(), plain, call.rotation, call.slots)
    found = rotary_kv(call.qkv.clone(), codes, call.rotation, call.slots, kv_scales=call.scales)
    assert torch.equal(found, wanted)
    want = call.kv.clone().view(torch.uint8)
    at = call.slots.blocks, slice(None), slice(None), call.slots.offsets
    want[at] = to_codes(plain, call.scales[:, :, None, None])[at]
    assert torch.equal(codes.view(torch.uint8), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_encoded_by_fixed_scales_and_decoded_to_code_times_scale(dtype):
    values = (torch.randn(3, 4, 32) * 20).to(dtype)
    scales = torch.tensor([0.01, 0.1, 1.0, 3.0])
    codes, back = torch.empty(3, 128, dtype=torch.uint8), torch.empty_like(values)
    encode(values, scales, codes)
    assert torch.equal(codes.view(3, 4, 32), to_codes(values, scales[:, None]))
    decode_of = codes.view(3, 4, 32).view(torch.float8_e4m3fn).float() * scales[:, None]
    read_codes(codes, scales, back)
    assert torch.equal(back, decode_of.to(dtype))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda kv, s: (kv, None), "kv is torch.float8_e4m3fn, but q is torch.float32"),
        (lambda kv, s: (kv.float(), s), "kv is torch.float32, expected torch.float8_e4m3fn"),
        (lambda kv, s: (kv, s[:, :1]), r"kv_scales has shape \(2, 1\), expected \(2, 2\)"),
        (lambda kv, s: (kv, s.double()), "kv_scales is torch.float64"),
        (lambda kv, s: (kv, s.t().contiguous().t()), "kv_scales has strides"),
        (lambda kv, s: (kv, s.to("meta")), "kv_scales is on meta, but q is on cpu"),
    ],
)
def test_pages_and_scales_that_do_not_fit_are_refused(change, text):
    case = code_cases.make([30], [1])
    kv, scales = change(case.kv, case.scales)
    with pytest.raises(BadTensor, match=text):
        decode(case.q, kv, case.batch, score_cases.rules(""), scales)
