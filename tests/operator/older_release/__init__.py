"""The release before this one, as upgrades meet it: which commit, its source, what it made.

There are no tags yet. The commit is the last one whose chart has no admission policies, whose
Secrets have plain names, whose operator makes its own Lease, and whose wire speaks protocol 1.

    python -m tests.operator.older_release    write the recorded children and the chart anew
"""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMIT = "02c65ccfed2a0727f8b156130dd6a137da304bb3"
HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
RECORDED = HERE / "recorded.json"
"""Revisions of many specs, and the children of one service."""
CHART = HERE / "chart.tgz"
"""Its chart with its CRDs, as ``helm`` takes it."""


def is_here() -> bool:
    """Whether this clone has the commit: a shallow one does not."""
    words = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{COMMIT}^{{commit}}"]
    return subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 0


def extract(folder: Path) -> None:
    """Write the release's source into a folder. Raises CalledProcessError."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["git", "-C", str(REPOSITORY), "archive", "--format=tar", COMMIT]
    archive = subprocess.run(words, capture_output=True, timeout=120, check=True)
    unpack = ["tar", "--extract", "--directory", str(folder)]
    subprocess.run(unpack, input=archive.stdout, timeout=120, check=True)
