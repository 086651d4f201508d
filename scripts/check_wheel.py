"""Holds a built wheel to what its images need of it.

Every file of every portion is in the wheel. Installed with the router's group alone, at the locked
versions, the router imports and torch is not there. Installed without extras, every command but
the operator's prints its help, and offline inference imports. Usage: check_wheel.py UV WHEEL
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROBE = """
import importlib.util
import tandem.router.app, tandem.link, tandem.llm, tandem.text, tandem.protocol
for absent in ("torch", "triton", "nixl", "transformers"):
    assert importlib.util.find_spec(absent) is None, f"{absent} is in the router's image"
"""


DEFAULT = """
import contextlib, io
import tandem.llm.offline
from tandem.cli.__main__ import COMMANDS, main
for command in COMMANDS:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "usage: tandem" in shown.getvalue(), f"{command} has no help"
for absent in ("kopf", "grpc", "nixl_cu13", "opentelemetry"):
    assert importlib.util.find_spec(absent) is None, f"{absent} is in the default install"
"""


def main(uv: str, wheel: Path) -> None:
    """Raises or exits with the first thing that is wrong."""
    check_files(wheel)
    probe(uv, wheel, PROBE, "--only-group", "router")
    probe(uv, wheel, "import importlib.util\n" + DEFAULT, "--no-default-groups")
    print(f"{wheel.name}: whole; the router imports without torch, every command without extras")


def probe(uv: str, wheel: Path, code: str, *choice: str) -> None:
    """Install the wheel next to the locked packages of a choice, and run the code there."""
    with tempfile.TemporaryDirectory() as folder:
        python = f"{folder}/venv/bin/python"
        locked = f"{folder}/requirements.txt"
        export = ["export", "--quiet", "--frozen", *choice]
        run(uv, *export, "--no-emit-project", "--output-file", locked)
        run(uv, "venv", "--quiet", f"{folder}/venv")
        run(uv, "pip", "install", "--quiet", "--python", python, "--requirement", locked)
        run(uv, "pip", "install", "--quiet", "--python", python, "--no-deps", str(wheel))
        run(python, "-P", "-c", code, cwd=folder)


def check_files(wheel: Path) -> None:
    """Exits naming the files of the checkout that the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    sources = {
        str(file.relative_to(portion.parent))
        for portion in ROOT.glob("*/tandem")
        if portion.parent.name != "charts"
        for file in portion.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    if missing := sorted(sources - packed):
        sys.exit(f"{wheel.name} lacks {len(missing)} files: {', '.join(missing[:5])}")


def run(*command: str, cwd: str | Path = ROOT) -> None:
    """Runs to the end within ten minutes, and exits with the command's own status."""
    done = subprocess.run(command, cwd=cwd, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} {command[1]} ended with {done.returncode}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
