"""Hold the boards to Grafana's dashboard-linter: ``make lint-dashboards``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.dashboards.__main__ import FOLDER
from scripts.rules.chart import ROOT

VERSION = "v0.2.0"
MODULE = f"github.com/grafana/dashboard-linter@{VERSION}"
PROGRAM = ROOT / ".tools" / f"dashboard-linter-{VERSION}" / "dashboard-linter"
CONFIG = Path(__file__).with_name("lint.yaml")
ENV_PROGRAM = "DASHBOARD_LINTER"
"""A linter that was built elsewhere, where its modules cannot be had."""
BUILD_SECONDS, LINT_SECONDS = 1800, 60


def find() -> Path | None:
    """The program, if it was built or given."""
    given = os.environ.get(ENV_PROGRAM)
    program = Path(given) if given else PROGRAM
    return program if program.is_file() else None


def build() -> Path:
    """The program; Go builds it from its module."""
    if (there := find()) is not None:
        return there
    print(f"building dashboard-linter {VERSION}", flush=True)
    environment = {**os.environ, "GOBIN": str(PROGRAM.parent)}
    command = ["go", "install", "-trimpath", MODULE]
    subprocess.run(command, check=True, env=environment, timeout=BUILD_SECONDS)
    return PROGRAM


def complaints(program: Path, board: Path) -> str:
    """Return the linter's messages about a board, in strict mode; empty if there are none."""
    command = [str(program), "lint", "--strict", "--config", str(CONFIG), str(board)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LINT_SECONDS, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


def main() -> int:
    """1 where a board does not pass."""
    program = build()
    boards = sorted(FOLDER.glob("*.json"))
    bad = {board: text for board in boards if (text := complaints(program, board))}
    for board, text in bad.items():
        print(f"{board.relative_to(ROOT)}:\n{text}")
    print(f"{len(boards) - len(bad)} of {len(boards)} boards pass")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
