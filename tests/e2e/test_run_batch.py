"""`tandem run-batch` with real workers: by a pair that runs, and by a server of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GONE_SECONDS = 90.0
"""A server of its own drains for a minute at most."""
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 12,
        },
    ),
    ("/v1/completions", {"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}),
    ("/v1/embeddings", {"input": ["Paris", "Rome"]}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
]


def answers(tmp_path: Path, *flags: str) -> dict[str, Any]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body})
        for at, (url, body) in enumerate(REQUESTS)
    ]
    source.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "tandem.cli", "run-batch", "-i", str(source)]
    done = subprocess.run(
        [*command, "-o", str(target), *flags], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr  # one of them is wrong
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {each["response"]["status_code"] for each in found} == {200, 400}
    return {each["custom_id"]: each["response"]["body"] for each in found}


@pytest.mark.nightly
def test_by_a_server_that_runs_and_by_one_of_its_own(
    small_pair: Stack, small: Path, tmp_path: Path
) -> None:
    """The same answers, and the server is gone afterwards."""
    by_pair = answers(tmp_path, "--url", small_pair.url)
    alone = answers(tmp_path, "--model", str(small))

    assert by_pair["0"]["choices"][0]["message"]["content"]
    for at in ("0", "1"):
        assert by_pair[at]["choices"] == alone[at]["choices"]
    assert len(by_pair["2"]["data"]) == 2
    assert by_pair["3"]["error"]["param"] == "temperature"


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether it is there and more than a name that nobody has asked after."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.1)


def is_ready(server: int) -> bool:
    assert runs(server), "the server ended before it was ready"
    words = Path(f"/proc/{server}/cmdline").read_text().split("\0")
    if "--port" not in words:  # it is a copy of its parent still
        return False
    url = f"http://127.0.0.1:{words[words.index('--port') + 1]}/ready"
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_that_is_killed_leaves_no_server(number: signal.Signals, tmp_path: Path) -> None:
    """The server, its router and its worker end by themselves: nobody else knows of them."""
    source = tmp_path / "in.jsonl"
    body = {"prompt": "One, two,", "max_tokens": 4000, "ignore_eos": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line))
    command = [sys.executable, "-m", "tandem.cli", "run-batch", "--model", "smollm2"]
    command += ["-i", str(source), "-o", str(tmp_path / "out.jsonl")]
    all_of_it: list[int] = []
    with (tmp_path / "log").open("wb") as log:
        batch = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: bool(children(batch.pid)), 60.0, "no server was started")
        (server,) = all_of_it = children(batch.pid)
        until(lambda: is_ready(server), 120.0, "the server is not ready")
        all_of_it += children(server)
        assert len(all_of_it) == 3
        batch.send_signal(number)
        batch.wait(60)
        until(lambda: not any(map(runs, all_of_it)), GONE_SECONDS, "the server runs on")
    finally:
        for pid in (batch.pid, *all_of_it):
            if runs(pid):
                os.kill(pid, signal.SIGKILL)
        batch.wait()
