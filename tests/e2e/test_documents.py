"""Command blocks of README and docs/ that a machine without a cluster can run, run as they stand.

Addresses, the model and the port are replaced; ``tests/test_documents.py`` checks all other blocks
with the parsers that read them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from stack import Stack
from tests.own_ports import own_ports
from tests.waiting import wait_for

ROOT = Path(__file__).parents[2]
READY_SECONDS = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def blocks(page: str, language: str) -> list[str]:
    """Return the blocks of a page in one language, in order."""
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def environ() -> dict[str, str]:
    """Return an environment in which `tandem` and `python` are those of the tests."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def run(script: str, folder: Path) -> str:
    """Return the output of a block in a shell that stops at the first error."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def started(script: str, folder: Path) -> Iterator[None]:
    """Run a block of a server until the end of the context."""
    with (folder / "servers.log").open("ab") as log:
        command = ["bash", "-euo", "pipefail", "-c", script]
        process = subprocess.Popen(
            command, cwd=folder, env=environ(), stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
            assert process.poll() is None, (folder / "servers.log").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_the_first_request_of_the_readme(pair: Stack, tmp_path: Path) -> None:
    """The first answer of a new user is Paris."""
    (script,) = [each for each in blocks("README.md", "sh") if each.startswith("curl ")]
    assert ":8000" in script
    answer = json.loads(run(script.replace(":8000", f":{pair.port}"), tmp_path))
    assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("README.md", "Paris"),
        pytest.param("docs/live.md", "generation_tokens", marks=pytest.mark.nightly),
    ],
)
def test_a_program_of_a_page(page: str, expected: str, tmp_path: Path) -> None:
    """A program in Python runs as it stands."""
    (program,) = blocks(page, "python")
    script = tmp_path / "program.py"
    script.write_text(program)
    assert expected in run(f"python {script}", tmp_path)


@pytest.mark.nightly
def test_two_machines_serve_by_the_commands_of_their_page(small: Path, tmp_path: Path) -> None:
    """Keys, two workers and a router on addresses of their own: the KV link is up, and a request
    with the key is answered."""
    number = own_ports(1)[0]
    first, second = (f"127.{number >> 8}.{number & 255}.{last}" for last in (1, 2))
    replaced = {
        "192.0.2.1": first,
        "192.0.2.2": second,
        "0.0.0.0": first,
        "Qwen/Qwen3-8B": str(small),
    }
    scripts = blocks("docs/two-machines.md", "sh")
    for old, new in replaced.items():
        assert any(old in each for each in scripts)
        scripts = [each.replace(old, new) for each in scripts]
    keys, *servers, look = scripts
    assert len(servers) == 3
    run(keys, tmp_path)

    def is_up() -> bool:
        try:
            fleet = json.loads(run(look, tmp_path))
        except (AssertionError, json.JSONDecodeError):
            return False
        return [each["state"] for each in fleet.get("handoff_links", ())] == ["up"]

    with ExitStack() as stack:
        for each in servers:
            stack.enter_context(started(each, tmp_path))
        log = tmp_path / "servers.log"
        wait_for(is_up, READY_SECONDS, every=0.5, seen=lambda: log.read_text()[-4000:])
        body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        words = f"curl -sS -H 'Authorization: Bearer KEY' http://{first}:8000/v1/completions"
        answer = json.loads(run(f"{words} --json '{json.dumps(body)}'", tmp_path))
    assert answer["usage"]["completion_tokens"] == 4
