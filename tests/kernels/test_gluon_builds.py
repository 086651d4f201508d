"""Kernels in Gluon build for Hopper, which needs no GPU; their results are tested on one."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
from triton.backends.compiler import GPUTarget
from triton.compiler import compile as build
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tandem.kernels.gemm.gluon_kernels import multiply_stream
from tandem.kernels.moe import ALPHA, LIMIT
from tandem.kernels.moe.gluon_kernels import multiply_experts
from tandem.kernels.tiled_gemm.gluon_kernels import multiply_tiles

HOPPER = GPUTarget("cuda", 90, 32)
OPTIONS = {"num_warps": 4, "maxnreg": 128, "enable_fp_fusion": True}


def box(dtype, shape, swizzle, bits):
    """Type of a tensor descriptor."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
    return f"tensordesc<{dtype}{list(shape)},{layout!r}>"


def built(kernel, types, constants):
    """The kernel, of parameters in its order."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = GluonASTSource(kernel, signature, constants, aligned)
    return build(source, target=HOPPER, options=OPTIONS)


RESULTS = {
    **dict.fromkeys(("bias", "residual", "out"), "*bf16"),
    "partials": "*fp32",
    "counters": "*i32",
    **dict.fromkeys(("rows", "outputs", "residual_row", "length", "pieces"), "i32"),
}


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize(
    ("rows", "inner", "split", "gated"), [(8, 512, 1, True), (64, 256, 2, False)]
)
def test_products_of_fp8_build(rows, inner, split, gated, channel):
    """Short and tall, gated and split."""
    types = {
        "w_desc": box("fp8e4nv", (32 if gated else 64, inner), 128, 8),
        "x_desc": box("fp8e4nv", (rows, inner), 128, 8),
        "scale_desc": box("fp32", (inner // 128, max(rows, 32)), 0, 32),
        "x_scale": "*fp32",
        "w_scale": "*fp32",
        "w_block": "i32",
        **RESULTS,
    }
    sizes = {"BM": rows, "BN": 64, "BK": inner, "GROUP": 1, "SPLIT": split, "STAGES": 3}
    kinds = {"BLOCK": 128, "CHANNEL": channel, "GATED": gated, "ADD": not gated, "BIAS": False}
    assert built(multiply_stream, types, {**sizes, **kinds, "PDL": True}).asm["cubin"]


@pytest.mark.parametrize(("rows", "blocks", "groups"), [(8, 4, 1), (64, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_with_tiles_build_without_an_exchange(rows, blocks, groups, dtype):
    """A tile's words become the operand in the thread that reads them, and no register spills."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    types = {
        "c_desc": box("i16", (blocks * 64, 32), 64, 16),
        "x_desc": box(name, (rows, blocks * 128), 128, 16),
        "scales": "*i32",
        **RESULTS,
    }
    sizes = {"BM": rows, "NB": blocks, "GROUPS": groups, "SPLIT": 2, "STAGES": 3}
    found = built(multiply_tiles, types, {**sizes, "ADD": True, "BIAS": False, "PDL": True})
    assert "wgmma.mma_async" in found.asm["ptx"]
    assert "st.local" not in found.asm["ptx"]


@pytest.mark.parametrize("block", [0, 128])
@pytest.mark.parametrize(
    ("rows", "down", "activation"),
    [(8, False, "clamped"), (64, True, "silu"), (16, False, "relu2")],
)
def test_products_of_experts_build(rows, down, activation, block):
    """Of bfloat16 and of fp8, with biases."""
    name, bits = ("fp8e4nv", 8) if block else ("bf16", 16)
    gated = not down and activation != "relu2"
    box_of_x = box(name, (rows, 256), 128, bits)
    types = {
        "w_desc": box(name, (32 if gated else 64, 256), 128, bits),
        "x_desc": box_of_x,
        "scale_desc": box("fp32", (2, max(rows, 32)), 0, 32) if block else box_of_x,
        **dict.fromkeys(("chosen", "slots"), "*i32"),
        **dict.fromkeys(("factors", "w_scale"), "*fp32"),
        "bias": "*bf16",
        "out": "*fp32" if down else "*bf16",
        **dict.fromkeys(("rows", "outputs", "num_chosen", "tiles", "length", "half"), "i32"),
        "w_block": "i32",
    }
    sizes = {"BM": rows, "BN": 64, "BK": 256, "STAGES": 3, "BLOCK": block}
    kinds = {"ACTIVATION": activation, "ALPHA": ALPHA, "LIMIT": LIMIT, "GATED": gated}
    ends = {"DOWN": down, "BIAS": True, "PDL": True}
    found = built(multiply_experts, types, {**sizes, **kinds, **ends})
    assert "st.local" not in found.asm["ptx"]
