"""The big packages of the worker in a folder of their own, for images that mount them.

Filled from the lock like the image itself, for the base's Python. uv links files from its cache
where it can, so the folder costs seconds and little disk.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from scripts.images.builder import REPOSITORY, ImageError, run

PATH = "/opt/tandem-mounted"
LIGHT = tuple(f"--only-group={name}" for name in ("hub", "router", "tracing", "model"))
"""Groups of the thin image; the router's brings all small packages of the worker."""
ARGUMENTS = {"CHOICE": " ".join(LIGHT), "MOUNTED": PATH, "COMPILER": ""}
"""No compiler either: nodes of tests have no GPU."""
WHOLE = tuple(f"--only-group={name}" for name in ("hub", "worker", "nixl"))
"""Groups of the folder. Tests on a cluster use no grammar library but guidance."""
PYTHON = "3.11"
"""Python of the made base."""
FILL_SECONDS = 1800.0


def fill(folder: Path) -> None:
    """Install the packages of ``WHOLE`` that the thin image lacks into the folder."""
    uv = find_uv()
    wanted = sorted(_locked(uv, WHOLE) - _locked(uv, LIGHT))
    text = "\n".join(wanted) + "\n"
    stamp = folder / ".requirements"
    digest = hashlib.sha256(text.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == digest:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    listed = folder / "requirements.txt"
    listed.write_text(text)
    words = [uv, "pip", "install", "--quiet", "--no-deps", "--python-version", PYTHON]
    words += ["--target", str(folder), "--requirements", str(listed)]
    run(words, seconds=FILL_SECONDS)
    # Pods mount the folder read-only: without bytecode each start would compile torch again. The
    # import compiles the modules that a worker loads, a tenth of all.
    words = ["env", "-u", "PYTHONDONTWRITEBYTECODE", f"PYTHONPATH={folder}"]
    words += [uv, "run", "--no-project", "--python", PYTHON, "python", "-c", "import torch"]
    run(words, seconds=FILL_SECONDS)
    stamp.write_text(digest)


def find_uv() -> str:
    """uv of the machine or of the checkout."""
    local = REPOSITORY / ".tools" / "uv"
    found = shutil.which("uv") or (str(local) if local.is_file() else None)
    if found is None:
        raise ImageError("uv is not there: `make setup` brings it")
    return found


def _locked(uv: str, choice: tuple[str, ...]) -> set[str]:
    """Locked requirements (``name==version ; marker``) of some groups."""
    words = [uv, "export", "--quiet", "--frozen", "--no-emit-project"]
    words += ["--no-hashes", "--no-annotate", "--no-header", *choice]
    told = subprocess.run(
        words, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    return {line for line in told.stdout.splitlines() if re.match(r"[A-Za-z0-9]", line)}
