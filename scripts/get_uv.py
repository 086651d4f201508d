"""Puts uv into a folder, with nothing but Python's standard library and no root.

Called by the Makefile where uv is not installed. Uses pip if this Python has it, since pip knows
the machine's proxies and mirrors; a bare Debian has no pip, so the wheel is then fetched from PyPI
and checked against the digest that PyPI states. Usage: get_uv.py VERSION FOLDER
"""

import hashlib
import importlib.util
import json
import platform
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

INDEX = "https://pypi.org/pypi/uv/{version}/json"
TIMEOUT_S = 60


def with_pip(version: str, folder: Path) -> bool:
    """Installs the wheel with pip into a folder of its own; False where there is no pip."""
    if importlib.util.find_spec("pip") is None:
        return False
    with tempfile.TemporaryDirectory() as into:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "--target", into, f"uv=={version}"], check=False).returncode:
            return False
        put(Path(into, "bin", "uv").read_bytes(), folder)
    return True


def from_index(version: str, folder: Path) -> None:
    """Fetches the wheel for this machine and takes the program out of it."""
    with urllib.request.urlopen(INDEX.format(version=version), timeout=TIMEOUT_S) as answer:
        files = json.load(answer)["urls"]
    wheel = next((file for file in files if fits(file["filename"])), None)
    if wheel is None:
        sys.exit(f"uv {version} has no wheel for {sys.platform} {platform.machine()}: install uv")
    with urllib.request.urlopen(wheel["url"], timeout=TIMEOUT_S) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != wheel["digests"]["sha256"]:
        sys.exit(f"{wheel['url']}: the content does not have the digest that PyPI states")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        with zipfile.ZipFile(file) as archive:
            program = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
            put(archive.read(program), folder)


def fits(filename: str) -> bool:
    """Whether a wheel's name says that it runs here."""
    machine = platform.machine()
    if sys.platform == "darwin":
        return "macosx" in filename and machine in filename
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    return libc in filename and f"_{machine}." in filename


def put(program: bytes, folder: Path) -> None:
    """Writes the program beside its place and renames it, so that it is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "uv.partial"
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(folder / "uv")


if __name__ == "__main__":
    asked, target = sys.argv[1], Path(sys.argv[2])
    if not with_pip(asked, target):
        from_index(asked, target)
