"""What examples/ shows is what happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.waiting import wait_for

from tandem.cli.serve.listening import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples"
READY_SECONDS = 120.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*words: str) -> str:
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:

    def ready() -> bool:
        assert process.poll() is None, f"not ready; exit status {process.poll()}"
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=2).close()
        except OSError:
            return False
        return True

    wait_for(ready, READY_SECONDS, every=0.2)


def test_offline(small: Path) -> None:
    lines = run(str(EXAMPLES / "offline.py"), str(small)).splitlines()
    answers = [line for line in lines if " -> " in line]
    assert [line.partition(" -> ")[0] for line in answers] == [
        "'Hello, my name is'",
        "'The capital of France is'",
        "'The future of AI is'",
    ]


@pytest.mark.nightly
def test_by_hand_and_online(smollm2: Path) -> None:
    """Three processes of the default model answer a client, and a signal ends all three."""
    (port,) = free_ports(1)
    script = str(EXAMPLES / "by_hand.sh")
    environ = {**os.environ, "TANDEM_KV_SECRET": "s" * 32}
    process = subprocess.Popen([script, "smollm2", str(port)], env=environ, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(url, process)
        assert "Paris" in run(str(EXAMPLES / "online.py"), url, "What is the capital of France?")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
