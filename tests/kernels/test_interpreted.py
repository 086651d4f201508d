"""The Triton kernels without a GPU: tests/kernels/gpu in Triton's interpreter, in its own process.

Its own process, because Triton decides at import whether it interprets.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"
FILES = sorted(set(FOLDER.glob("test_*.py")) - {FOLDER / "test_cublaslt.py"})  # a library's kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_triton_kernels_agree_with_their_references_when_interpreted(file):
    """Every kernel that the interpreter can run gives its reference's answer on small shapes."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
