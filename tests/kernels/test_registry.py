"""Ops choose their backend by name or device, and tests can hold one backend to another."""

import sys
from collections.abc import Callable

import pytest
import torch

from tandem.kernels import Backend, NoBackend, Op, ops
from tandem.kernels.norm import RMS_NORM, rms_norm
from tandem.kernels.testing import hold


def test_the_device_picks_and_the_caller_may_overrule():
    """On a CPU the LLVM backend runs; asking for it by name is the same function."""
    chosen = RMS_NORM.on(torch.device("cpu"))
    assert chosen is RMS_NORM.on(torch.device("cpu"), Backend.LLVM)
    assert chosen is not RMS_NORM.on(torch.device("cpu"), Backend.TORCH)


def test_a_missing_backend_is_named_with_those_there_are():
    """NoBackend says what the op has."""
    with pytest.raises(NoBackend, match=r"norm\.rms_norm has no backend 'gluon'; it has .*torch"):
        rms_norm(torch.ones(1, 2), torch.ones(2), 1e-5, backend=Backend.GLUON)


def test_backends_are_imported_at_first_use():
    """An op that nobody calls imports nothing; one for no known device says so."""
    op: Op[Callable[..., object]] = Op("test.lazy", {Backend.TORCH: "colorsys:rgb_to_hsv"})
    sys.modules.pop("colorsys", None)
    assert "colorsys" not in sys.modules
    op.on(torch.device("cpu"))
    assert "colorsys" in sys.modules
    only_gpu: Op[Callable[..., object]] = Op("test.gpu", {Backend.TRITON: "nowhere:nothing"})
    with pytest.raises(NoBackend, match=r"test\.gpu runs on no cpu"):
        only_gpu.on(torch.device("cpu"))
    assert {"test.lazy", "test.gpu", "norm.rms_norm"} <= set(ops())


def test_hold_compares_results_and_written_arguments():
    """A backend that agrees passes; one that differs is refused with the place."""
    where = {Backend.TORCH: f"{__name__}:right", Backend.TRITON: f"{__name__}:wrong"}
    op: Op[Callable[..., object]] = Op("test.held", where)
    op._loaded.update({Backend.TORCH: right, Backend.TRITON: right, Backend.GLUON: wrong})
    x = torch.ones(3)
    assert hold(op, Backend.TRITON, x).worst == 0.0
    assert torch.equal(x, torch.ones(3))
    with pytest.raises(AssertionError, match="argument 0"):
        hold(op, Backend.GLUON, x)


def right(x):
    x.add_(1)
    return x.sum()


def wrong(x):
    total = right(x)
    x[0] = 0
    return total
