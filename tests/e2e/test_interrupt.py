"""Ctrl-C on `tandem up`: streams end in order, a second one ends all at once, nothing remains."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.cli.serve.listening import LOOPBACK, free_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]


class Up:
    """A `tandem up` as a user runs it; its output so far is in ``said``."""

    def __init__(self, model: Path, log: Path) -> None:
        (self.port,) = free_ports(1)
        self.log = log
        words = ["up", "--model", str(model), "--served-model-name", "smol"]
        words += ["--port", str(self.port), "--router.drain-timeout", "120"]
        words += ["--num-gpu-blocks-override", "512", "--drain-seconds", "120"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem.cli", *words], stdout=out, stderr=out
            )
        self.children: list[psutil.Process] = []

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    async def until_it_says(self, text: str, seconds: float = 120.0) -> None:
        """Wait for a line; the process must not end meanwhile without it."""
        async with asyncio.timeout(seconds):
            while text not in self.said:
                assert self.process.poll() is None, self.said
                await asyncio.sleep(0.05)
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self) -> None:
        os.kill(self.process.pid, signal.SIGINT)

    async def ended(self, seconds: float = 60.0) -> int:
        """Its exit status; every process that it had has ended too."""
        status = await asyncio.to_thread(self.process.wait, seconds)
        left = [child for child in self.children if child.is_running()]
        assert not left, self.said
        return status


@pytest.fixture
def up(smollm2: Path, tmp_path: Path) -> Iterator[Up]:
    """Started, and ended whatever the test does."""
    stack = Up(smollm2, tmp_path / "terminal")
    try:
        yield stack
    finally:
        stack.process.terminate()
        try:
            stack.process.wait(60)
        except subprocess.TimeoutExpired:
            stack.process.kill()
            stack.process.wait()


async def stream(up: Up, tokens: int) -> AsyncIterator[str]:
    """Events of one streamed completion of exactly ``tokens`` tokens."""
    body = {"model": "smol", "prompt": "Once upon a time", "max_tokens": tokens}
    body |= {"stream": True, "ignore_eos": True, "temperature": 0}
    url = f"http://{LOOPBACK}:{up.port}/v1/completions"
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", url, json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


@pytest.mark.nightly
async def test_a_stream_under_way_is_finished_after_ctrl_c(up: Up) -> None:
    """The answer is whole, however long that takes within the drain, and nothing is left then."""
    await up.until_it_says("serving smol")
    events = []
    async for event in stream(up, 32):
        events.append(event)
        if len(events) == 1:
            up.interrupt()
    assert events[-1] == "[DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert await up.ended() == 0
    assert "all processes have ended" in up.said


@pytest.mark.nightly
async def test_a_second_ctrl_c_ends_everything_at_once(up: Up) -> None:
    """Nobody has to wait for a stream of minutes, and nothing is left then, either."""
    await up.until_it_says("serving smol")
    events = stream(up, 6000)
    await anext(events)
    up.interrupt()
    await up.until_it_says("Ctrl-C again ends at once")
    up.interrupt()
    assert await up.ended(10.0) == 0
    with pytest.raises(httpx.HTTPError):
        async for _ in events:
            pass


async def test_ctrl_c_while_the_stack_starts_leaves_nothing(up: Up) -> None:
    """Workers that still load end, too."""
    await up.until_it_says("tandem | model")
    up.interrupt()
    assert await up.ended() in (0, 130)
