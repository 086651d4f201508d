"""Kernels written in Gluon compile for Hopper with the Triton that is installed, without a GPU.

Gluon has no interpreter, and its names change from one release of Triton to the next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any

import pytest
from tests.kernels.compiling import COMPILE_SECONDS, compiler, shared_bytes
from triton.experimental.gluon import language as gl

from tandem.kernels.attention.decode import gluon as decode
from tandem.kernels.attention.decode import plan_kernels as decode_plan
from tandem.kernels.attention.descriptors import layout_of
from tandem.kernels.attention.prefill.gluon import DEFAULT
from tandem.kernels.attention.prefill.plan_kernels import PLAN_FIELDS
from tandem.kernels.gemm.form import Form
from tandem.kernels.gemm.gluon import REGISTERS, SHARED_BYTES, ring_fits
from tandem.kernels.gemm.table import forms_of

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
PREFILL = "tandem.kernels.attention.prefill.gluon_kernels:prefill_tiles"
DECODE = "tandem.kernels.attention.decode.gluon_kernels:decode_stream"
STREAMED = "tandem.kernels.gemm.gluon_kernels:multiply_stream"
Compile = Callable[..., int]


@pytest.fixture(scope="module")
def shared() -> Iterator[Compile]:
    """Compiles a kernel for Hopper and says how much shared memory it takes."""
    with compiler() as pool:

        def compiled(
            kernel: str, types: dict[str, str], constants: dict[str, Any], **options: int
        ) -> int:
            done = pool.submit(shared_bytes, kernel, types, constants, options)
            return done.result(COMPILE_SECONDS)

        yield compiled


def box(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}],{LAYOUT!r}>"


def box_of_codes(rows: int, columns: int) -> str:
    return f"tensordesc<fp8e4nv[{rows}, {columns}],{layout_of(columns, 1)!r}>"


GEMMS = [
    (64, Form(64, 128, 2, stages=6, stream=True), False),
    (8, Form(64, 64, 4, stages=5, stream=True, group=4), False),
    (64, Form(64, 128, stages=3, stream=True, group=3), True),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "form", "gated"), GEMMS)
def test_streamed_products_compile(shared: Compile, rows: int, form: Form, gated: bool) -> None:
    """Split, grouped and gated ones, within the shared memory that there is."""
    pointers = dict.fromkeys(("bias", "residual", "out"), "*bf16")
    numbers = dict.fromkeys(("rows", "outputs", "residual_row", "length", "pieces"), "i32")
    types = {
        "w_desc": box(form.outputs // (2 if gated else 1), form.inner),
        "x_desc": box(rows, form.inner),
        "partials": "*fp32",
        "counters": "*i32",
        **pointers,
        **numbers,
    }
    constants = {
        "BM": rows,
        "BN": form.outputs,
        "BK": form.inner,
        "GROUP": form.group,
        "SPLIT": form.split,
        "STAGES": form.stages,
        "GATED": gated,
        "ADD": not gated,
        "BIAS": False,
        "PDL": True,
    }
    assert shared(STREAMED, types, constants, maxnreg=REGISTERS) <= SHARED_BYTES


def test_forms_of_the_table_fit() -> None:
    """What was measured is what the launcher's own sum lets through."""
    name = "nvidia-h200.json"
    table = json.loads((files("tandem.kernels.gemm") / "tables" / name).read_text())
    found = {key: form for key, form in forms_of(table).items() if form.stream}
    assert found
    assert all(ring_fits(form, most) for (_, _, _, most), form in found.items())


@pytest.mark.nightly
@pytest.mark.parametrize("window", [0, 1000])
def test_prefill_attention_compiles(shared: Compile, window: int) -> None:
    """As it is launched for 32 query and 8 KV heads of 128."""
    numbers = ("table_row", "block_rows", "two_rows", "head_rows")
    types = {
        "q_desc": box(64, 128),
        "kv_desc": box(64, 128),
        "tables": "*i32",
        "plan": "*i32",
        "count": "*i32",
        "out": "*bf16",
        **dict.fromkeys(numbers, "i32"),
        "scale": "fp32",
    }
    constants = {
        "HEADS": 32,
        "GROUP": 4,
        "D": 128,
        "PAGE": 64,
        "BN": DEFAULT.keys,
        "WINDOW": window,
        "STAGES": DEFAULT.stages,
        "FIELDS": PLAN_FIELDS,
        "PINGPONG": DEFAULT.take_turns,
        "CONSUMER_REGS": DEFAULT.consumer_registers,
        "PRODUCER_REGS": DEFAULT.producer_registers,
    }
    assert shared(PREFILL, types, constants) <= SHARED_BYTES


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(("group", "queries", "dim", "window"), [(4, 1, 128, 0), (4, 4, 64, 100)])
def test_decode_attention_compiles(
    shared: Compile, group: int, queries: int, dim: int, window: int, codes: bool
) -> None:
    """As it is launched for 8 KV heads; as many fit on a multiprocessor as it is planned for."""
    kept, boxes = group * queries, box_of_codes if codes else box
    numbers = ("q_t", "q_h", "table_row", "block_rows", "two_rows", "head_rows")
    types = {
        "kv_desc": boxes(decode.TILE, dim),
        "tail_desc": boxes(decode.TILE // 4, dim),
        **dict.fromkeys(("q", "out"), "*bf16"),
        **dict.fromkeys(("tables", "lengths", "starts", "plan", "arrivals"), "*i32"),
        **dict.fromkeys(("pieces", "stats"), "*fp32"),
        **dict.fromkeys(numbers, "i32"),
        "scale": "fp32",
        "kv_scales": "*fp32",
    }
    constants = {
        "KV_HEADS": 8,
        "GROUP": group,
        "D": dim,
        "PAGE": 64,
        "TILE": decode.TILE,
        "WINDOW": window,
        "N": max(8, kept),
        "KEPT": kept,
        "WIDE": max(2, 32 // kept),
        "STAGES": decode.DEFAULT.ring // (decode.TILE * dim * (2 if codes else 4)),
        "FIELDS": decode_plan.PLAN_FIELDS,
        "SPACING": decode_plan.COUNTER_STRIDE,
        "CODES": codes,
        "PRODUCER_REGS": decode.DEFAULT.producer_registers,
        "AHEAD": True,
        "PDL": True,
    }
    taken = shared(DECODE, types, constants, maxnreg=decode.REGISTERS)
    each = taken + 1024  # a kibibyte of each program is the system's
    assert (SHARED_BYTES + 1024) // each == decode.DEFAULT.shares_per_sm
