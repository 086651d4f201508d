"""Commands of pods begin without the packages of a person's commands, which images have not."""

from __future__ import annotations

import subprocess
import sys

import pytest

RUN = """
import sys
for name in ("aiohttp", "httpx", *sys.argv[1].split()):
    sys.modules[name] = None
from tandem.cli.__main__ import main
sys.exit(main(sys.argv[2:]))
"""
OF_WORKERS = "httptools kubernetes starlette uvicorn uvloop"
"""What the worker's image has not."""
OF_OTHERS = "torch llguidance safetensors gguf huggingface_hub filelock rich"
"""What the router's and the operator's have not."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("lacks", "words"),
    [
        ("", ["--version"]),
        (OF_OTHERS, ["operator", "--help"]),
        (OF_OTHERS, ["router", "--help"]),
        (OF_WORKERS, ["prefill", "--help"]),
        (OF_WORKERS, ["decode", "--help"]),
        (OF_WORKERS, ["node-agent", "--help"]),
        (OF_WORKERS, ["prepare", "--help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_pods_command_begins(lacks: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, lacks, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "tandem" in done.stdout


@pytest.mark.parametrize(
    ("lacks", "words", "extra"),
    [
        ("kopf", ["operator"], "tandem-serving[operator]"),
        ("starlette", ["router"], "tandem-serving with its dependencies"),
    ],
)
def test_a_command_without_its_package_names_what_to_install(
    lacks: str, words: list[str], extra: str
) -> None:
    """One line on stderr and status 1, no traceback."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, lacks, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert f"install {extra}" in done.stderr
    assert "Traceback" not in done.stderr
