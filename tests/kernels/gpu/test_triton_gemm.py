"""Products with few rows in Triton against float64, with everything that folds in."""

import json
from pathlib import Path

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, DTYPES, GPU, HOPPER, NEEDS, size
from torch.nn.functional import silu

from tandem.kernels.gemm import linear, linear_add, norm_gated, norm_linear, table, triton
from tandem.kernels.gemm.form import Form, Kind, row_class
from tandem.kernels.gemm.rule import form_of
from tandem.kernels.norm import rms_norm

pytestmark = NEEDS
ERROR = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}
TABLES = sorted(Path(table.__file__).parent.joinpath("tables").glob("*.json"))


def operands(rows, outputs, inner, dtype):
    """x with a row stride, weight with one, bias, residual and gain."""
    torch.manual_seed(5)
    x = torch.randn(rows, inner + 8)[:, :inner]
    weight = torch.randn(outputs, inner + 16)[:, :inner] / inner**0.5
    rest = (torch.randn(outputs), torch.randn(rows, outputs), torch.randn(inner))
    return [each.to(dtype).to(DEVICE) for each in (x, weight, *rest)]


def near(got, want, dtype, roundings=1):
    """||got - want|| / ||want|| within the rounding of so many intermediate results."""
    return float((got.double() - want).norm() / want.norm()) < roundings * ERROR[dtype]


def normed(x, gain):
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain.double()


FORMS = [
    (1, Form(4, 64, warps=4), 3),
    (1, Form(2, 128, warps=4), 1),
    (1, Form(8, 512, warps=8), 1),
    (7, Form(32, 64), 3),
    (16, Form(64, 128, split=2, warps=4), 2),
    (33, Form(16, 64, split=4, stages=4, warps=2), 1),
    (64, Form(64, 64, stages=4), 4),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "form", "chunks"), FORMS)
def test_products_in_any_form_agree_with_float64(rows, form, chunks, dtype):
    """Plain, with bias, added to the residual, gated; rows and weights with strides."""
    outputs, inner = size(256, 64), form.inner * form.split * chunks
    x, weight, bias, residual, _ = operands(rows, outputs, inner, dtype)
    want = x.double() @ weight.double().t()
    for _ in range(2):  # the counters of split sums are zero again
        assert near(triton.launch(x, weight, form), want, dtype)
    assert near(triton.launch(x, weight, form, bias=bias), want + bias.double(), dtype)
    wide = triton.launch(x, weight, form, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert near(wide, want, torch.float32, 100)
    total = residual.double() + want
    assert triton.launch(x, weight, form, residual=residual) is residual
    assert near(residual, total, dtype)
    if form.split == 1 and rows > 1:
        gate, up = want.chunk(2, -1)
        assert near(triton.launch(x, weight, form, gated=True), silu(gate) * up, dtype)


STREAMS = [
    (1, Form(64, 256, stages=4, stream=True), 3),
    (5, Form(64, 128, 2, stages=6, stream=True), 5),
    (16, Form(128, 64, 4, stages=3, stream=True), 2),
    (33, Form(128, 128, stages=4, stream=True), 9),
    (64, Form(64, 128, 2, stages=6, stream=True), 1),
    (100, Form(128, 64, stages=4, stream=True), 7),
    (64, Form(64, 128, stages=3, stream=True, group=2), 9),
    (7, Form(64, 64, 4, stages=5, stream=True, group=4), 3),
    (64, Form(64, 64, 2, stages=6, stream=True, group=2), 2),
    (128, Form(64, 64, stages=5, stream=True, group=2), 5),
]


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [256, 128 * 300])
@pytest.mark.parametrize(("rows", "form", "length"), STREAMS)
def test_streamed_products_agree_with_float64(rows, form, length, outputs, dtype):
    """Pieces of any length, fewer and more of them than programs, all that folds in."""
    inner = form.inner * form.split * length
    x, weight, bias, residual, _ = operands(rows, outputs, inner, dtype)
    want = x.double() @ weight.double().t()
    first = triton.launch(x, weight, form)
    assert near(first, want, dtype)
    for _ in range(3):  # the counters of split sums are zero again, and their order is fixed
        assert torch.equal(triton.launch(x, weight, form), first)
    assert near(triton.launch(x, weight, form, bias=bias), want + bias.double(), dtype)
    assert near(triton.launch(x, weight, form, out_dtype=torch.float32), want, torch.float32, 100)
    stream = residual.float()
    triton.launch(x, weight, form, residual=residual)
    assert near(residual, stream.double() + want, dtype)
    total = stream.double() + want
    triton.launch(x, weight, form, residual=stream)
    assert near(stream, total, torch.float32, 100)
    gate, up = want.chunk(2, -1)
    assert near(triton.launch(x, weight, form, gated=True), silu(gate) * up, dtype)


SHAPES = [(4608, 3584), (3584, 18944), (1152, 896), (896, 4864), (9728, 896), (2048, 1536)]
"""Outputs and inner size: of Qwen2.5's, none of them a power of two."""
RULED = [(*shape, rows) for shape in SHAPES for rows in (1, 5, 32, 64)]
RULED = [each for each in RULED if each[1] < 16384 or each[2] <= 16]  # the rest is cuBLAS's


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("outputs", "inner", "rows"), RULED)
def test_forms_of_the_rule_agree_with_float64(outputs, inner, rows):
    """What shapes of no table get, with bias, added to a float32 stream, and gated."""
    torch.manual_seed(7)
    most = row_class(rows)
    assert most is not None
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(outputs, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
    want = x.double() @ weight.double().t()
    form = form_of(Kind.PLAIN, outputs, inner, most, 132)
    assert form is not None
    assert triton.fits(form, Kind.PLAIN, outputs, inner, rows)
    for _ in range(2):  # the counters of split sums are zero again
        got = triton.launch(x, weight, form, bias=bias)
        assert near(got, want + bias.double(), torch.bfloat16)
    stream = torch.randn(rows, outputs, device="cuda")
    total = stream.double() + want
    assert near(triton.launch(x, weight, form, residual=stream), total, torch.float32, 100)
    form = form_of(Kind.GATED, outputs, inner, most, 132)
    if form is not None:
        gate, up = want.chunk(2, -1)
        assert near(triton.launch(x, weight, form, gated=True), silu(gate) * up, torch.bfloat16)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_product_waits_for_the_norm_before_it():
    """Norm and products after each other, each launched early, give what they give apart."""
    torch.manual_seed(2)
    form = Form(64, 256, stages=4, stream=True)
    weights = [torch.randn(4096, 4096, device="cuda").to(torch.bfloat16) / 64 for _ in range(8)]
    gain = torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    start = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda")

    def run(between):
        x = start
        for weight in weights:
            x = triton.launch(rms_norm(x, gain, 1e-6), weight, form)
            between()
        return x

    want = run(torch.cuda.synchronize)
    for _ in range(20):
        assert torch.equal(run(lambda: None), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 40, 100])
def test_the_ops_agree_with_float64(rows, dtype):
    """Whatever the table chooses, and beyond it."""
    outputs, inner = size(4096, 32), size(4096, 48)
    x, weight, bias, residual, gain = operands(rows, outputs, inner, dtype)
    want = x.double() @ weight.double().t()
    after = normed(x, gain) @ weight.double().t()
    gate, up = after.chunk(2, -1)
    assert near(linear(x, weight, bias), want + bias.double(), dtype)
    wide = linear(x, weight, bias, out_dtype=torch.float32)
    assert near(wide, want + bias.double(), torch.float32, 100)
    assert near(linear_add(x, weight, residual.clone()), residual.double() + want, dtype)
    assert near(norm_linear(x, gain, 1e-6, weight), after, dtype, 2)
    assert near(norm_gated(x, gain, 1e-6, weight), silu(gate) * up, dtype, 3)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_hold_forms_that_fit_their_shapes(path):
    """Every form of every table fits its shape, and was faster than doing without it."""
    content = json.loads(path.read_text())
    forms = table.forms_of(content)
    assert forms
    for (kind, outputs, inner, rows), form in forms.items():
        assert triton.fits(form, kind, outputs, inner, rows)
    assert all(e["us"] < e["without_us"] for e in content["entries"] if e["form"] is not None)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_products_run_in_a_graph():
    """A captured split product gives the same bits at every replay."""
    form = Form(64, 128, split=2)
    x, weight, *_ = operands(8, 1024, 1024, torch.bfloat16)
    first = triton.launch(x, weight, form)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton.launch(x, weight, form)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, first)
