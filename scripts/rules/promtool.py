"""Programs of Prometheus' Go module, built into ``.tools`` when they are not there."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from scripts.rules.chart import ROOT

VERSION = "v0.316.0"
"""Of the module: Prometheus 3.16."""
_COMMANDS = "github.com/prometheus/prometheus/cmd"
FOLDER = ROOT / ".tools" / f"promtool-{VERSION}"
BUILD_SECONDS = 1800


def find(name: str = "promtool") -> Path | None:
    """The program, if it was built."""
    program = FOLDER / name
    return program if program.is_file() else None


def build(name: str = "promtool") -> Path:
    """The program; a build takes minutes, with everything to download, and needs Go 1.26."""
    if (there := find(name)) is not None:
        return there
    print(f"building {name} {VERSION}", flush=True)
    environment = {**os.environ, "GOBIN": str(FOLDER), "CGO_ENABLED": "0"}
    command = ["go", "install", "-trimpath", f"{_COMMANDS}/{name}@{VERSION}"]
    subprocess.run(command, check=True, env=environment, timeout=BUILD_SECONDS)
    return FOLDER / name
