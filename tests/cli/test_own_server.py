"""The server that `run-batch` starts for itself."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tandem.cli.batch.run_batch import run
from tandem.cli.serve.own_server import own_server
from tandem.protocol.errors import TandemError

CHAT = '{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
FAKE = """#!{python}
import os, sys
with open({log!r}, "w") as log:
    print(*sys.argv[1:], sep="\\n", file=log)
sys.exit(7)
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a program in Python's place writes its words down, before it ends."""
    program, log = tmp_path / "python", tmp_path / "words"
    program.write_text(FAKE.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return log


def test_flags_of_a_batchs_server_are_split_as_by_a_shell(told: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(CHAT)
    flags = "--torch-profiler-dir='/tmp/a folder' --max-num-seqs 8"
    words = ["-i", str(source), "-o", str(tmp_path / "out"), "--model", "m"]
    with pytest.raises(TandemError, match="ended with status 7"):
        run([*words, "--serve-flags", flags])
    given = told.read_text().splitlines()
    assert given[-3:] == ["--torch-profiler-dir=/tmp/a folder", "--max-num-seqs", "8"]


def test_a_server_is_where_it_is_waited_for(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says, or a config file that it names: it was waited for in vain."""
    monkeypatch.setenv("TANDEM_HOST", "0.0.0.0")
    monkeypatch.setenv("TANDEM_PORT", "9")
    source = tmp_path / "in.jsonl"
    source.write_text(CHAT)
    with pytest.raises(TandemError, match="ended with status 7"):
        run(["-i", str(source), "-o", str(tmp_path / "out"), "--model", "m"])
    words = told.read_text().splitlines()
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert int(words[words.index("--port") + 1]) >= 10_000


def test_a_time_without_end_is_refused(tmp_path: Path) -> None:
    """The server would refuse it, too, after the file was read."""
    words = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"), "--model", "m"]
    with pytest.raises(TandemError, match="a finite number above 0"):
        run([*words, "--ready-seconds", "inf"])


STUBBORN = """#!{python}
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    time.sleep(60)
"""


def test_a_server_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the time that it has for that, whatever its own processes do."""
    program, log = tmp_path / "python", tmp_path / "log"
    program.write_text(STUBBORN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with (
        log.open("wb") as output,
        own_server([], stop_seconds=0.2, output=output) as server,
    ):
        deadline = time.monotonic() + 60.0
        while "deaf" not in log.read_text():
            assert server.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert server.process.returncode == -signal.SIGKILL
