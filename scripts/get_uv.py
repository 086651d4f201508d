"""Puts uv into a folder, with nothing but Python's standard library and no root.

Called by the Makefile where uv is not installed. Uses pip if this Python has it, since pip knows
the machine's proxies and mirrors; a bare Debian has no pip, so the wheel is then fetched from PyPI
and checked against the digest that PyPI states. Usage: get_uv.py VERSION FOLDER
"""

import hashlib
import importlib.util
import platform
import subprocess
import sys
import tempfile
import zipfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

INDEX = "https://pypi.org/simple/uv/"
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
    links = Links()
    links.feed(fetch(INDEX).decode())
    url = next((url for url in links.urls if fits(url.rpartition("/")[2], version)), None)
    if url is None:
        sys.exit(f"uv {version} has no wheel for {sys.platform} {platform.machine()}: install uv")
    address, _, digest = url.partition("#sha256=")
    content = fetch(address)
    if hashlib.sha256(content).hexdigest() != digest:
        sys.exit(f"{address}: the content does not have the digest that PyPI states")
    with tempfile.TemporaryFile() as file:
        file.write(content)
        with zipfile.ZipFile(file) as archive:
            program = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
            put(archive.read(program), folder)


class Links(HTMLParser):
    """The addresses that a page of the index links to (the layout of PEP 503)."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps the address of each link, made absolute."""
        if tag == "a" and (href := dict(attrs).get("href")):
            self.urls.append(urljoin(INDEX, href))


def fetch(url: str) -> bytes:
    """The content behind an address of the index."""
    with urlopen(url, timeout=TIMEOUT_S) as answer:
        content: bytes = answer.read()
    return content


def fits(filename: str, version: str) -> bool:
    """Return whether a file is the wheel of this version for this machine."""
    machine = platform.machine()
    filename = filename.partition("#")[0]
    if not filename.startswith(f"uv-{version}-") or not filename.endswith(".whl"):
        return False
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
