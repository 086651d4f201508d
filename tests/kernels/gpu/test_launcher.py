"""What a launcher remembers is what Triton would have taken. In the interpreter, where nothing is
built, everything goes through Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.gpu.where import DEVICE, GPU, NEEDS
from torch import Tensor
from triton.runtime.jit import JITFunction

from tandem.kernels.launch.ahead import building_ahead
from tandem.kernels.launch.launcher import MOST, Launcher

pytestmark = NEEDS
builds = pytest.mark.skipif(not GPU, reason="needs a GPU: the interpreter builds nothing")


@triton.jit(do_not_specialize=["loose", "shift"])  # type: ignore[untyped-decorator]
def scaled(x, out, loose, shift, row, eps, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """out[r] = x[r * row :] * loose[0] + shift + eps, or without eps. Grid: (rows,)."""
    r = tl.program_id(0)
    col = tl.arange(0, WIDTH)
    value = tl.load(x + r * row + col).to(tl.float32) * tl.load(loose) + shift
    if ADD:
        value += eps
    tl.store(out + r * WIDTH + col, value.to(out.dtype.element_ty))


class Asked:
    def __init__(self) -> None:
        self.times = 0


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Counts the launches that go through Triton."""
    seen, plain = Asked(), JITFunction.run

    def run(self: Any, *args: Any, **named: Any) -> Any:
        seen.times += 1
        return plain(self, *args, **named)

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def hold(
    launch: Launcher, x: Tensor, *, row: int, shift: int = 3, eps: float = 0.5, add: bool = True
) -> None:
    """A launch over two rows gives what torch does."""
    out = torch.full((2, 32), -1.0, dtype=torch.float32, device=DEVICE)
    factors = torch.full((9,), 2.0, device=DEVICE)[1:]  # begins 4 bytes behind the allocation
    launch((2,), x, out, factors, shift, row, eps, WIDTH=32, ADD=add, num_warps=1)
    want = x.as_strided((2, 32), (row, 1)).float() * 2 + shift + (eps if add else 0)
    torch.testing.assert_close(out, want)


@builds
def test_a_remembered_build_is_found_without_triton(asked: Asked) -> None:
    """And gives the same; loose numbers and where loose tensors begin make no difference."""
    launch, x = Launcher(scaled), torch.randn(256, device=DEVICE)
    hold(launch, x, row=64)
    assert asked.times == 1
    for shift in (1, 16, 7):
        hold(launch, torch.randn(256, device=DEVICE), row=64, shift=shift)
    assert asked.times == 1


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("row", (64, 32, 1, 33)),
        ("shift", (3, 1 << 31, 5, (1 << 40) + 1)),
        ("eps", (0.5, 2.0)),
        ("add", (True, False)),
    ],
)
def test_what_triton_tells_apart_is_told_apart(change: str, values: tuple[Any, ...]) -> None:
    """Back and forth between numbers that Triton builds for: 1, multiples of 16, wide ones."""
    launch, x = Launcher(scaled), torch.randn(256, device=DEVICE)
    for value in (*values, *reversed(values), *values):
        hold(launch, x, **{"row": 64, change: value})


def test_types_are_told_apart() -> None:
    launch, x = Launcher(scaled), torch.randn(256, device=DEVICE)
    for dtype in (torch.float32, torch.bfloat16, torch.float16) * 2:
        hold(launch, x.to(dtype), row=64)


@builds
def test_tensors_that_begin_elsewhere_go_through_triton(asked: Asked) -> None:
    """A build may count on 16 bytes; one for others is not remembered for them, nor the other way
    round."""
    launch, x = Launcher(scaled), torch.randn(256, device=DEVICE)
    hold(launch, x[1:], row=64)
    hold(launch, x, row=64)
    hold(launch, x[3:], row=64)
    hold(launch, x[4:], row=64)
    assert asked.times == 3


@builds
def test_launches_follow_the_current_stream() -> None:
    """A graph holds a remembered launch."""
    launch, x = Launcher(scaled), torch.ones(256, device=DEVICE)
    out, factors = torch.zeros(2, 32, device=DEVICE), torch.ones(8, device=DEVICE)

    def run() -> None:
        launch((2,), x, out, factors, 0, 32, 0.0, WIDTH=32, ADD=False, num_warps=1)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    x.fill_(5.0)
    out.zero_()
    graph.replay()
    assert out.eq(5.0).all()


@builds
def test_nothing_runs_while_kernels_are_built_ahead(asked: Asked) -> None:
    """Neither what is remembered nor what is not."""
    launch, x = Launcher(scaled), torch.ones(256, device=DEVICE)
    out, factors = torch.zeros(2, 32, device=DEVICE), torch.ones(8, device=DEVICE)

    def run(row: int) -> None:
        launch((2,), x, out, factors, 0, row, 0.0, WIDTH=32, ADD=False, num_warps=1)

    run(32)
    out.zero_()
    with building_ahead():
        run(32)
        run(48)
    assert out.eq(0.0).all()
    run(48)
    assert out.eq(1.0).all()
    before = asked.times
    run(48)
    assert asked.times == before


@builds
def test_what_is_remembered_is_bounded() -> None:
    """Beyond MOST builds it begins anew."""
    launch, x = Launcher(scaled), torch.randn(256, device=DEVICE)
    for number in range(MOST + 2):
        hold(launch, x, row=64, eps=float(number))
    assert len(launch._builds) == 2
