"""Weights of a layer's experts: their reading, and their form in memory.

Experts are plain, or e4m3 in blocks of 128 by 128. A rank has a part of each expert's width. On a
CPU each plain expert has products of its own, as other layers have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.engine.config.experts import ExpertFacts
from tandem.engine.config.families.experts import matrices
from tandem.engine.config.quantization import Fp4Kind, Fp4Scheme, Fp8Scheme, QuantFacts, Scheme
from tandem.engine.loader import INPUTS, OUTPUTS, LinearPart, Weights
from tandem.engine.quant.base import PlainMethod, Product
from tandem.engine.quant.fp4 import Fp4Method
from tandem.engine.quant.fp8 import CODES, rounded
from tandem.kernels.fp8_gemm import BLOCK
from tandem.kernels.moe import ExpertActivation, ExpertWeights, Routes, expert_feed_forward
from tandem.kernels.moe.reference import activated, sum_of_experts

_GROUP = 32
"""Numbers of MXFP4 with one scale."""
_STACKED_WIDTH, _STACKED_INPUTS = 1, 2
"""Dimensions of tensors of all experts that ranks cut."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Experts of one layer of the checkpoint."""

    prefix: str
    """Names of the experts' tensors up to the last common dot."""
    facts: ExpertFacts
    hidden: int


class Experts(Protocol):
    """Experts of one layer of a rank."""

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """Return float32 [tokens, hidden] of x [tokens, hidden]; a partial sum of several ranks."""
        ...


@dataclass(frozen=True, slots=True)
class JoinedExperts:
    """Experts in one tensor of each kind."""

    weights: ExpertWeights
    activation: ExpertActivation

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return expert_feed_forward(x, self.weights, routes, self.activation)


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts with products of their own, whose weights may stay in the mapped file."""

    inner: tuple[Product, ...]
    """Products of gate and up, or of up only."""
    down: tuple[Product, ...]
    activation: ExpertActivation

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        return sum_of_experts(x, routes, len(self.down), self._of_expert)

    def _of_expert(self, x: Tensor, expert: int) -> Tensor:
        inner = activated(self.inner[expert].in_float32(x), self.activation)
        return self.down[expert].in_float32(inner.to(x.dtype))


class ExpertMethod(Protocol):
    """One form of experts."""

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        """Load the experts of a rank. Raises a LoadError."""
        ...


class Matrix(NamedTuple):
    """Weight [out, in] of a rank, or e4m3 codes with their scales."""

    numbers: Tensor
    scale: Tensor | None = None


class OneExpert(NamedTuple):
    """Matrices of one expert."""

    inner: tuple[Matrix, ...]
    """Gate and up, or up only."""
    down: Matrix


class PlainExperts:
    """Weights in the engine's type; on a CPU in the file's, if the method permits it."""

    def __init__(self, method: PlainMethod) -> None:
        self._method = method

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        if source.device.type != "cpu":
            return joined(source, part, plain(source, part))
        separate = self._stacked if part.facts.names.stacked else self._each
        inner, down = zip(*separate(source, part), strict=True)
        return SeparateExperts(inner, down, ExpertActivation(part.facts.activation.value))

    def _each(self, source: Weights, part: ExpertPart) -> Iterator[tuple[Product, Product]]:
        load, (width, hidden) = self._method.load, (part.facts.width, part.hidden)
        cut, cut_inputs = source.shard(OUTPUTS), source.shard(INPUTS)
        for number in range(part.facts.num_experts):
            *inner, down = matrices(part.prefix, part.facts, number)
            parts = [LinearPart(each, (width, hidden), shard=cut) for each in inner]
            last = LinearPart(down, (hidden, width), shard=cut_inputs)
            yield load(source, parts), load(source, [last])

    def _stacked(self, source: Weights, part: ExpertPart) -> Iterator[tuple[Product, Product]]:
        of_inner, of_down = _biases(source, part)
        for number, each in enumerate(_of_stacked(source, part)):
            inner = torch.cat([matrix.numbers for matrix in each.inner])
            bias = None if of_inner is None else of_inner[number]
            last = None if of_down is None else of_down[number]
            down = each.down.numbers.contiguous()
            yield self._method.hold(inner, bias), self._method.hold(down, last)


class RoundedExperts:
    """Plain weights of the checkpoint, rounded at load to e4m3 in blocks."""

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        return joined(source, part, self._experts(source, part))

    def _experts(self, source: Weights, part: ExpertPart) -> Iterator[OneExpert]:
        for each in plain(source, part):
            inner = tuple(Matrix(*rounded(matrix.numbers)) for matrix in each.inner)
            yield OneExpert(inner, Matrix(*rounded(each.down.numbers)))


class BlockExperts:
    """Codes and scales of the checkpoint, of each expert on its own."""

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        return joined(source, part, _of_each(source, part, self._read))

    @staticmethod
    def _read(source: Weights, prefix: str, shape: tuple[int, int], dim: int) -> Matrix:
        name, shard = f"{prefix}.weight", source.shard(dim)
        shard.span(name, shape[dim], BLOCK)
        codes = source.raw(name, CODES, shape, shard)
        blocks = tuple(-(-extent // BLOCK) for extent in shape)
        scales = f"{name}_scale_inv" if f"{name}_scale_inv" in source else f"{name}_scale"
        return Matrix(codes, source.get(scales, blocks, shard, dtype=torch.float32))


class Mxfp4Experts:
    """MXFP4 in gpt-oss's tensors of all experts, re-coded at load to e4m3 in blocks."""

    def __init__(self) -> None:
        self._method = Fp4Method(Fp4Scheme(Fp4Kind.MX))

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        return joined(source, part, self._experts(source, part))

    def _experts(self, source: Weights, part: ExpertPart) -> Iterator[OneExpert]:
        width, hidden, prefix = part.facts.width, part.hidden, part.prefix
        inner = self._read(source, part, "gate_up_proj", (2 * width, hidden), _STACKED_WIDTH)
        down = self._read(source, part, "down_proj", (hidden, width), _STACKED_INPUTS)
        for of_inner, of_down in zip(
            zip(*inner, strict=True), zip(*down, strict=True), strict=True
        ):
            halves = (tuple(each[at::2] for each in of_inner) for at in (0, 1))
            name = f"{prefix}.gate_up_proj"
            gate, up = (Matrix(*self._method.recoded(name, *each)) for each in halves)
            yield OneExpert(
                (gate, up), Matrix(*self._method.recoded(f"{prefix}.down_proj", *of_down))
            )

    @staticmethod
    def _read(
        source: Weights, part: ExpertPart, name: str, shape: tuple[int, int], dim: int
    ) -> tuple[Tensor, Tensor]:
        """Return uint8 [experts, out, in / 2], low bits first, and the exponents [experts, out, in
        / 32], of this rank."""
        whole = (part.facts.num_experts, shape[0], shape[1] // _GROUP)
        shard, full = source.shard(dim), f"{part.prefix}.{name}"
        blocks = source.raw(f"{full}_blocks", torch.uint8, (*whole, _GROUP // 2), shard)
        return blocks.flatten(2), source.raw(f"{full}_scales", torch.uint8, whole, shard)


class ExpertForms:
    """Method of each layer's own scheme."""

    def __init__(self, facts: QuantFacts | None, method: PlainMethod) -> None:
        """``method`` is that of plain weights."""
        self._facts = facts
        self._methods: dict[Scheme | None, ExpertMethod] = {None: PlainExperts(method)}

    def load(self, source: Weights, part: ExpertPart) -> Experts:
        """Load the experts of one layer. Raises a LoadError."""
        first = matrices(part.prefix, part.facts)[0]
        scheme = None if self._facts is None else self._facts.scheme(first)
        if scheme not in self._methods:
            self._methods[scheme] = _method(scheme)
        return self._methods[scheme].load(source, part)


def _method(scheme: Scheme | None) -> ExpertMethod:
    if isinstance(scheme, Fp4Scheme):
        return Mxfp4Experts()
    assert isinstance(scheme, Fp8Scheme), "other forms are refused before weights are loaded"
    return RoundedExperts() if scheme.at_load else BlockExperts()


def plain(source: Weights, part: ExpertPart) -> Iterator[OneExpert]:
    """Yield the plain matrices of each expert."""
    if not part.facts.names.stacked:
        return _of_each(source, part, _read_plain)
    return _of_stacked(source, part)


def _read_plain(source: Weights, prefix: str, shape: tuple[int, int], dim: int) -> Matrix:
    return Matrix(source.get(f"{prefix}.weight", shape, source.shard(dim)))


class _Read(Protocol):
    def __call__(
        self, source: Weights, prefix: str, shape: tuple[int, int], dim: int
    ) -> Matrix: ...


def _of_each(source: Weights, part: ExpertPart, read: _Read) -> Iterator[OneExpert]:
    width, hidden = part.facts.width, part.hidden
    for number in range(part.facts.num_experts):
        *inner, down = matrices(part.prefix, part.facts, number)
        yield OneExpert(
            tuple(read(source, each, (width, hidden), OUTPUTS) for each in inner),
            read(source, down, (hidden, width), INPUTS),
        )


def _of_stacked(source: Weights, part: ExpertPart) -> Iterator[OneExpert]:
    count, width, hidden = part.facts.num_experts, part.facts.width, part.hidden
    shard = source.shard(_STACKED_INPUTS)
    both = source.get(f"{part.prefix}.gate_up_proj", (count, hidden, 2 * width), shard)
    shard = source.shard(_STACKED_WIDTH)
    down = source.get(f"{part.prefix}.down_proj", (count, width, hidden), shard)
    for of_inner, of_down in zip(both, down, strict=True):
        gate, up = of_inner[:, ::2].t(), of_inner[:, 1::2].t()
        yield OneExpert((Matrix(gate), Matrix(up)), Matrix(of_down.t()))


def joined(source: Weights, part: ExpertPart, experts: Iterator[OneExpert]) -> Experts:
    """Return the experts in one tensor of each kind."""
    first = next(experts)
    inner, down = _Joined(first.inner, part), _Joined((first.down,), part)
    inner.put(0, first.inner)
    down.put(0, (first.down,))
    for number, each in enumerate(experts, 1):
        inner.put(number, each.inner)
        down.put(number, (each.down,))
    weights = ExpertWeights(
        inner.numbers, down.numbers, inner.scales, down.scales, *_biases(source, part)
    )
    return JoinedExperts(weights, ExpertActivation(part.facts.activation.value))


class _Joined:
    """Matrices of all experts in one tensor; those of an expert are one below the other."""

    def __init__(self, first: tuple[Matrix, ...], part: ExpertPart) -> None:
        count = part.facts.num_experts
        self.numbers = _room([each.numbers for each in first], count)
        scales = [each.scale for each in first if each.scale is not None]
        self.scales = _room(scales, count) if scales else None

    def put(self, number: int, matrices: tuple[Matrix, ...]) -> None:
        for at, each in enumerate(matrices):
            for to, tensor in ((self.numbers, each.numbers), (self.scales, each.scale)):
                if to is not None and tensor is not None:
                    to[number].tensor_split(len(matrices))[at].copy_(tensor)


def _room(tensors: list[Tensor], count: int) -> Tensor:
    rows = sum(len(each) for each in tensors)
    return tensors[0].new_empty(count, rows, tensors[0].shape[1])


def _biases(source: Weights, part: ExpertPart) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases of the stacked products. If ranks' results are summed, only the first has
    that of ``down``."""
    if not part.facts.expert_bias:
        return None, None
    count, width = part.facts.num_experts, part.facts.width
    shard = source.shard(_STACKED_WIDTH)
    both = source.get(f"{part.prefix}.gate_up_proj_bias", (count, 2 * width), shard)
    down = source.get(f"{part.prefix}.down_proj_bias", (count, part.hidden)).clone()
    inner = torch.cat((both[:, ::2], both[:, 1::2]), 1)
    return inner, None if source.ranks.rank else down
