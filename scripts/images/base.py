"""A base image made by Debian's debootstrap, for machines that reach no image registry.

It stands in for the Dockerfiles' own base: Debian with its Python as python3. Made once and kept.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from scripts.images.builder import Builder, ImageError, run

SUITE = "bookworm"
REFERENCE = f"localhost/tandem-base:{SUITE}"
PACKAGES = "ca-certificates,python3,python3-venv"
DEBOOTSTRAP_SECONDS = 900.0
WASTE = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man")


def make(builder: Builder, work: Path) -> str:
    """Name of the base image in the builder's storage; made if it is not there."""
    known = builder.command("inspect", "--type", "image", REFERENCE)
    if subprocess.run(known, capture_output=True, timeout=60, check=False).returncode:
        _import(builder, _root(work / "rootfs" / SUITE))
    return REFERENCE


def _root(folder: Path) -> Path:
    """Debian's smallest system with Python, in a folder."""
    if folder.exists():
        return folder
    if shutil.which("debootstrap") is None:
        raise ImageError("debootstrap is not installed; on Debian: apt-get install debootstrap")
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    words = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(partial)]
    run(words, seconds=DEBOOTSTRAP_SECONDS)
    for waste in WASTE:
        shutil.rmtree(partial / waste, ignore_errors=True)
    partial.rename(folder)
    return folder


def _import(builder: Builder, root: Path) -> None:
    """One layer of the folder's files, with the path that python3 is found on."""
    context = root.parent / "base-context"
    context.mkdir(exist_ok=True)
    archive = context / "root.tar"
    run(["tar", "--create", "--file", str(archive), "--directory", str(root), "."])
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    dockerfile = context / "Dockerfile"
    dockerfile.write_text(f'FROM scratch\nADD root.tar /\nENV PATH={path}\nCMD ["python3"]\n')
    words = ["build", "--quiet", "--tag", REFERENCE, "--file", str(dockerfile), str(context)]
    run(builder.command(*words))
    shutil.rmtree(context)
