"""A GPU that kernels are built for, and that runs nothing: in a process without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class Hopper:
    """What a launch asks of a driver; it has no way to run anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def use_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found on disk; launches go to a driver that cannot launch."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(driver, "_active", Hopper())
