"""The model of words: its program says what it does, and writes where it is told to alone."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "pair" / "words.py"


@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), ([], 2), (["--folder"], 2)])
def test_asked_for_help_it_writes_nothing(
    words: list[str], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder of that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(PROGRAM), run_name="__main__")
    assert end.value.code == status
    assert not list(tmp_path.iterdir())
