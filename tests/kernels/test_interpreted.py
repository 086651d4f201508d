"""The Triton kernels without a GPU: tests/kernels/gpu in Triton's interpreter, in its own process.

Its own process, because Triton decides at import whether it interprets; one for all files, because
what they import takes longer than most of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parent / "gpu"
FILES = sorted(set(FOLDER.glob("test_*.py")) - {FOLDER / "test_cublaslt.py"})  # a library's kernels
SECONDS = 900.0
LONGEST = ("--timeout", "600")
"""Of one case, which is to end what hangs: on a busy machine the first one to compare tensors takes
minutes to import what torch compares them with."""

pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(SECONDS)]
Cases = list[ElementTree.Element]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Cases]:
    """What pytest wrote of each case, by the name of its file."""
    pytest.importorskip("triton")
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *LONGEST]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, f"--junitxml={report}", *map(str, FILES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: of a case, which is told below
    found: dict[str, Cases] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        found.setdefault(case.get("classname", "").rpartition(".")[2], []).append(case)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_triton_kernels_agree_with_their_references_when_interpreted(
    file: Path, cases: dict[str, Cases]
) -> None:
    """Every kernel that the interpreter can run gives its reference's answer on small shapes."""
    outcomes = [{part.tag for part in case} for case in cases.get(file.stem, [])]
    wrong = [
        ElementTree.tostring(case, encoding="unicode")
        for case in cases.get(file.stem, [])
        if case.find("failure") is not None or case.find("error") is not None
    ]
    assert not wrong, "\n".join(wrong)
    assert set() in outcomes, "none passed"
