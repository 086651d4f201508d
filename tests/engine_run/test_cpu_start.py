"""What a rank on a CPU loads to start: nothing that only a GPU has a use for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.engine_run.tiny_models import folder_of

CODE = """
import sys
from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.uniproc import UniProcExecutor

config = EngineConfig.of(sys.argv[1], device="cpu", num_gpu_blocks_override=8)
EngineCore.launch(config, UniProcExecutor()).close()
print(sorted({"triton", "sympy", "torch._dynamo"} & set(sys.modules)))
"""


@pytest.mark.full
def test_a_cpus_engine_starts_without_what_builds_kernels() -> None:
    """Each of these is a good part of a second of every start, and of every restart."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder_of("llama"))],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
