"""Kernels are built in threads while nothing runs: for Hopper, without a GPU."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tests.kernels.hopper import use_hopper
from tests.kernels.latent_cases import Sizes, latent_case
from triton import knobs
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from tandem.kernels import Backend
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.activation.triton_kernels import silu_and_mul_rows
from tandem.kernels.attention import PagedBatch, Scores
from tandem.kernels.attention.decode.triton_kernels import decode_shares
from tandem.kernels.attention.prefill import prefill
from tandem.kernels.attention.prefill.triton_kernels import prefill_tiles
from tandem.kernels.gemm.gluon import SHARED_BYTES
from tandem.kernels.launch.ahead import building_ahead
from tandem.kernels.mla import LatentNorm, latent_kv, mla_decode, mla_prefill, rotary_pairs
from tandem.kernels.mla.triton_kernels import (
    attend_expanded,
    attend_latents,
    expand_latents,
    merge_splits,
)
from tandem.kernels.rotary_kv import Rotation, SlotMapping

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_hopper(tmp_path, monkeypatch)
    yield
    silu_and_mul_rows.device_caches.clear()


@pytest.mark.slow
@pytest.mark.parametrize("queries", [1, 70])
def test_attention_multiplies_float32_as_it_is(queries: int) -> None:
    """A decode's and a prompt's: TF32, Triton's own choice, has the precision of float16."""
    lengths = torch.tensor([queries], dtype=torch.int32)
    starts, tables = torch.tensor([0, queries], dtype=torch.int32), lengths.new_zeros(1, 8)
    batch = PagedBatch(starts, lengths, tables, queries, queries)
    kv, q = torch.zeros(1, 2, 1, 16, 16), torch.zeros(queries, 16, 16)
    kernel = prefill_tiles if queries > 1 else decode_shares
    kernel.device_caches.clear()
    with building_ahead():
        prefill(q, kv, batch, Scores(1.0), backend=Backend.TRITON)
    (built,) = kernel.device_caches[0][0].values()
    kernel.device_caches.clear()
    assert "tt.dot" in built.asm["ttir"]
    assert "tf32" not in built.asm["ttir"]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dim", [192, 256, 512])
@pytest.mark.parametrize("queries", [8, 70])
def test_heads_in_tiles_fit_in_shared_memory(queries: int, dim: int) -> None:
    """Of the most rows that a decode kernel takes, and of a prompt, with every rule of Scores."""
    lengths = torch.tensor([queries], dtype=torch.int32)
    starts, tables = torch.tensor([0, queries], dtype=torch.int32), lengths.new_zeros(1, 8)
    batch = PagedBatch(starts, lengths, tables, queries, queries)
    kv = torch.zeros(2, 2, 1, 64, dim, dtype=torch.bfloat16)
    q = torch.zeros(queries, 8, dim, dtype=torch.bfloat16)
    rules = Scores(1.0, window=40, softcap=3.0, sinks=torch.zeros(8), slopes=torch.zeros(8))
    kernel = prefill_tiles if queries == 70 else decode_shares
    kernel.device_caches.clear()
    with building_ahead():
        prefill(q, kv, batch, rules, backend=Backend.TRITON)
    (built,) = kernel.device_caches[0][0].values()
    kernel.device_caches.clear()
    assert built.metadata.shared <= SHARED_BYTES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_attention_of_deepseek_fits_in_shared_memory(dtype: torch.dtype) -> None:
    """Kernels of whole and of split keys, for the 16 heads of one of 8 ranks."""
    real = Sizes(heads=16, rank=512, rope=64, nope=128, value=128, page=64)
    case = latent_case([600, 70], [70, 70], sizes=real, dtype=dtype)
    kernels = (attend_latents, merge_splits, expand_latents, attend_expanded)
    for kernel in kernels:
        kernel.device_caches.clear()
    rotation = Rotation(*torch.zeros(2, 140, 64, dtype=dtype))
    slots, norm = torch.zeros(140, dtype=torch.int64), LatentNorm(torch.ones(512).to(dtype), 1e-6)
    with building_ahead():
        for batch in (case.batch, replace(case.batch, max_query_len=1, max_seq_len=70)):
            mla_decode(*case.absorbed, case.kv, batch, 1.0, backend=Backend.TRITON)
        mla_prefill(case.q, case.kv, case.kv_b, case.batch, 1.0, backend=Backend.TRITON)
        rows = case.q.flatten(1)[:, :576]
        latent_kv(rows, case.kv, rotation, SlotMapping(slots, slots), norm, backend=Backend.TRITON)
        rotary_pairs(case.q, rotation, backend=Backend.TRITON)
    for kernel in kernels:
        for built in kernel.device_caches[0][0].values():
            assert built.metadata.shared <= SHARED_BYTES
        kernel.device_caches.clear()


@triton.jit
def broken(x):
    x.nothing()


def test_launches_build_in_threads_and_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shapes of one op are two kernels; a launch after the block finds them."""
    builders = []

    def built(**_: Any) -> None:
        builders.append(threading.current_thread())

    monkeypatch.setattr(knobs.compilation, "listener", built)
    launch = JITFunction.run
    with building_ahead():
        for dtype in (torch.bfloat16, torch.float16):
            silu_and_mul(torch.ones(4, 512, dtype=dtype), backend=Backend.TRITON)
    assert JITFunction.run is launch
    kernels = list(silu_and_mul_rows.device_caches[0][0].values())
    assert len(kernels) == len(builders) == 2
    assert all(kernel.asm["cubin"] for kernel in kernels)
    assert threading.main_thread() not in builders


def test_no_two_threads_parse_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.7's ast.parse raises a SystemError now and then when threads share it."""
    parse, inside, at_once = JITFunction.parse, [0], []

    def slow(self: JITFunction[Any]) -> ast.Module:
        inside.append(1)
        at_once.append(sum(inside))
        time.sleep(0.05)
        inside.remove(1)
        tree: ast.Module = parse(self)
        return tree

    monkeypatch.setattr(JITFunction, "parse", slow)
    with building_ahead():
        for dtype in (torch.bfloat16, torch.float16):
            silu_and_mul(torch.ones(4, 512, dtype=dtype), backend=Backend.TRITON)
    assert JITFunction.parse is slow
    assert len(at_once) >= 4, "each of two kernels calls another"
    assert max(at_once) == 1


def test_what_cannot_be_built_is_raised() -> None:
    launch = JITFunction.run
    with pytest.raises(CompilationError, match="nothing"), building_ahead():
        broken[(1,)](torch.ones(4))
    assert JITFunction.run is launch
