"""promtool, built from Prometheus' Go module into ``.tools`` when it is not there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts.rules.chart import ROOT

VERSION = "v0.316.0"
"""Of the module: Prometheus 3.16."""
_PACKAGE = f"github.com/prometheus/prometheus/cmd/promtool@{VERSION}"
FOLDER = ROOT / ".tools" / f"promtool-{VERSION}"
BUILD_SECONDS = 1800


def find() -> Path | None:
    """The program, if it was built."""
    program = FOLDER / "promtool"
    return program if program.is_file() else None


def build() -> Path:
    """The program; a build takes minutes, with everything to download, and needs Go 1.26."""
    if (there := find()) is not None:
        return there
    print(f"building promtool {VERSION}", flush=True)
    environment = {**os.environ, "GOBIN": str(FOLDER), "CGO_ENABLED": "0"}
    subprocess.run(
        ["go", "install", "-trimpath", _PACKAGE], check=True, env=environment, timeout=BUILD_SECONDS
    )
    return FOLDER / "promtool"
