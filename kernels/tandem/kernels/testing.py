"""Comparison of a kernel with its reference, for tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .registry import Backend, Op

F = TypeVar("F", bound=Callable[..., object])

TOLERANCE = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 1e-3),
}
"""(relative, absolute) by dtype: a few roundings of the output type."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a backend's result from the reference's."""

    worst: float
    """Largest absolute difference over every tensor."""
    where: str


def hold(op: Op[F], backend: Backend, *args: object) -> Difference:
    """Run `op` on copies of `args` through the reference and `backend`; both must agree.

    Results and arguments are compared, integers exactly, floats within TOLERANCE. Raises
    AssertionError with the place of the worst difference.
    """
    wanted_args, got_args = copy.deepcopy(args), copy.deepcopy(args)
    wanted = op.load(Backend.TORCH)(*wanted_args)
    got = op.load(backend)(*got_args)
    worst = Difference(0.0, "nowhere")
    pairs = [("result", wanted, got)]
    pairs += [(f"argument {i}", w, g) for i, (w, g) in enumerate(_zip(wanted_args, got_args))]
    for name, expected, actual in pairs:
        for place, a, b in _tensors(name, expected, actual):
            difference = _compare(f"{op.name} on {backend.value}, {place}", a, b)
            if difference > worst.worst:
                worst = Difference(difference, place)
    return worst


def _zip(a: tuple[object, ...], b: tuple[object, ...]) -> list[tuple[object, object]]:
    return list(zip(a, b, strict=True))


def _tensors(name: str, a: object, b: object) -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [(name, a, b)]
    if isinstance(a, tuple) and isinstance(b, tuple):
        return [t for i, (x, y) in enumerate(_zip(a, b)) for t in _tensors(f"{name}[{i}]", x, y)]
    return []


def _compare(place: str, expected: Tensor, actual: Tensor) -> float:
    assert actual.shape == expected.shape, f"{place}: {actual.shape} is not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{place}: {actual.dtype} is not {expected.dtype}"
    if expected.is_floating_point() and expected.itemsize == 1:
        expected, actual = expected.view(torch.uint8), actual.view(torch.uint8)
    if not expected.is_floating_point():
        assert torch.equal(actual, expected), f"{place}: integers differ"
        return 0.0
    rtol, atol = TOLERANCE.get(expected.dtype, (1e-5, 1e-5))
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{place}: {m}"
    )
    finite = torch.isfinite(expected)
    gap = (actual[finite].double() - expected[finite].double()).abs()
    return float(gap.max()) if gap.numel() else 0.0
