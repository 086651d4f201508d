"""Ops of one decoder layer and of the head at the shapes of a model, with the bytes that each must
move.

Each case uses several sets of operands in turn, so that memory is as cold as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.activation import silu_and_mul
from tandem.kernels.attention.batch import Scores
from tandem.kernels.attention.decode import decode
from tandem.kernels.attention.prefill import prefill
from tandem.kernels.gemm import linear
from tandem.kernels.measure.timing import Shape, make_case
from tandem.kernels.norm import rms_norm
from tandem.kernels.rotary_kv import QKNorm, Rotation, SlotMapping, rotary_kv
from tandem.kernels.sampling import best

from .timing import L2_BYTES

MOST_SETS = 24
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a model; the default is Qwen3-8B."""

    hidden: int = 4096
    inner: int = 12288
    vocabulary: int = 151_936
    shape: Shape = field(default_factory=Shape)
    window: int | None = None
    """Tokens that a query attends to; None is all."""

    @property
    def scores(self) -> Scores:
        return Scores(self.shape.head_dim**-0.5, self.window)


class Bench(NamedTuple):
    """One measurement: `run` makes `calls` calls."""

    name: str
    run: Callable[[], object]
    calls: int
    bytes: int
    """Bytes that a call must move."""
    operations: int
    """Operations that a call must make in the matrix units; 0 for none."""


@dataclass(frozen=True, slots=True)
class ModelOps:
    """Cases of one model on one device."""

    sizes: Sizes
    device: torch.device

    def cases(self, tokens: int, context: int) -> Iterator[Bench]:
        """Yield every op of a step of ``tokens`` sequences of ``context`` tokens that draw one
        each."""
        yield from self._products(tokens)
        yield self._decode(tokens, context)
        yield from self._small(tokens)

    def _products(self, tokens: int) -> Iterator[Bench]:
        sizes, shape = self.sizes, self.sizes.shape
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        for name, outputs, inner in (
            ("qkv", wide, sizes.hidden),
            ("o", sizes.hidden, shape.heads * shape.head_dim),
            ("gate and up", 2 * sizes.inner, sizes.hidden),
            ("down", sizes.hidden, sizes.inner),
            ("head", sizes.vocabulary, sizes.hidden),
        ):
            size = outputs * inner * shape.dtype.itemsize
            x = self._random(tokens, inner)
            sets = [(x, self._random(outputs, inner)) for _ in range(self._sets(size))]
            yield _each(f"{name}, {tokens} rows", linear, sets, size, 2 * tokens * outputs * inner)

    def _decode(self, tokens: int, context: int) -> Bench:
        shape, scores = self.sizes.shape, self.sizes.scores
        size = tokens * min(context, scores.window or context) * shape.key_bytes
        layers = self._sets(size)
        case = make_case(shape, [context] * tokens, [1] * tokens, layers, str(self.device))
        sets = [(case.q[i], case.layer(i), case.batch, scores) for i in range(layers)]
        return _each(f"decode attention, {tokens} x {context}", decode, sets, size)

    def prompt(self, context: int) -> Bench:
        """Return attention of one prompt of ``context`` tokens."""
        shape, scores = self.sizes.shape, self.sizes.scores
        case = make_case(shape, [context], [context], 2, str(self.device))
        sets = [(case.q[i], case.layer(i), case.batch, scores) for i in range(2)]
        seen = min(context, scores.window or context)
        pairs = seen * (seen + 1) // 2 + (context - seen) * seen
        work = 4 * shape.heads * shape.head_dim * pairs
        size = context * (shape.key_bytes + 2 * case.q[0, 0].numel() * shape.dtype.itemsize)
        return _each(f"prefill attention, {context}", prefill, sets, size, work)

    def _small(self, tokens: int) -> Iterator[Bench]:
        sizes, shape = self.sizes, self.sizes.shape
        width = shape.dtype.itemsize
        size = 2 * tokens * sizes.hidden * width
        gain = self._random(sizes.hidden)
        rows = [(self._random(tokens, sizes.hidden), gain, EPS) for _ in range(self._sets(size))]
        yield _each(f"rms_norm, {tokens}", rms_norm, rows, size)
        size = 3 * tokens * sizes.inner * width
        gates = [(self._random(tokens, 2 * sizes.inner),) for _ in range(self._sets(size))]
        yield _each(f"silu_and_mul, {tokens}", silu_and_mul, gates, size)
        yield self._rotary(tokens)
        logits = self._random(tokens, sizes.vocabulary)
        yield Bench(f"best token, {tokens}", lambda: best(logits), 1, logits.nbytes, 0)

    def _rotary(self, tokens: int) -> Bench:
        shape, sets = self.sizes.shape, 8
        page, dim = shape.page, shape.head_dim
        place = torch.randperm(-(-tokens // page) * page, device=self.device)[:tokens]
        slot_mapping = SlotMapping(place // page, place % page)
        rotation = Rotation(self._random(tokens, dim), self._random(tokens, dim))
        norm = QKNorm(self._random(dim), self._random(dim), EPS)
        kv_cache = self._random(-(-tokens // page), sets, 2, shape.kv_heads, page, dim)
        heads = shape.heads + 2 * shape.kv_heads
        operands = [
            (self._random(tokens, heads, dim), kv_cache[:, i], rotation, slot_mapping, norm)
            for i in range(sets)
        ]
        moved = heads + shape.heads + 3 * shape.kv_heads
        size = tokens * dim * shape.dtype.itemsize * moved
        return _each(f"rotary_kv with qk-norm, {tokens}", rotary_kv, operands, size)

    def _sets(self, size: int) -> int:
        """Return the number of sets that keeps each out of L2 until its next turn."""
        if self.device.type != "cuda":
            return 2
        return max(2, min(MOST_SETS, 4 * L2_BYTES // max(size, 1) + 1))

    def _random(self, *shape: int) -> Tensor:
        dtype = self.sizes.shape.dtype
        return torch.randn(*shape, dtype=dtype, device=self.device).mul_(shape[-1] ** -0.5)


def _each(name: str, op: Callable[..., object], sets: list[Any], size: int, work: int = 0) -> Bench:
    return Bench(name, lambda: [op(*operands) for operands in sets], len(sets), size, work)
