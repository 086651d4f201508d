"""SIGUSR1: every thread by name and every task, and the process goes on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from itertools import takewhile
from pathlib import Path

import httpx
import pytest
from stack import Stack
from tests.waiting import wait_for

from tandem.cli.serve import stack_dump

pytestmark = pytest.mark.full

HELD = """
import ctypes, sys, threading
from tandem.cli.serve.stack_dump import dump_on_signal
dump_on_signal()
print("ready", flush=True)
ctypes.PyDLL(None).sleep(4)  # keeps the interpreter
print("awake", flush=True)
"""


def test_threads_are_told_by_name_with_where_they_stand() -> None:
    """Innermost call last; those that nobody named are told, too."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(30,), name="one that waits", daemon=True)
    thread.start()
    try:
        # It is started before it waits, and inner calls of waiting come and go.
        told = wait_for(
            lambda: _told_in_wait("one that waits"), seen=lambda: [*stack_dump.stacks()]
        )
    finally:
        go_on.set()
        thread.join()
    assert any(line.startswith("thread 'MainThread'") for line in told)


def _told_in_wait(name: str) -> list[str]:
    """All lines, once the thread of that name stands in the innermost ``wait``; until then none."""
    lines = list(stack_dump.stacks())
    begin = next((n for n, line in enumerate(lines) if line.startswith(f"thread '{name}'")), None)
    if begin is None:
        return []
    stack = list(takewhile(lambda line: line.startswith("  "), lines[begin + 1 :]))
    stands = bool(stack) and "threading.py" in stack[-1] and "in wait" in stack[-1]
    return lines if stands else []


async def test_tasks_are_told_with_what_they_wait_for() -> None:

    async def inner() -> None:
        await asyncio.sleep(30)

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="one that sleeps")
    await asyncio.sleep(0)
    lines = list(stack_dump.stacks())
    task.cancel()
    begin = lines.index("task 'one that sleeps'")
    said = " ".join(lines[begin : begin + 5])
    assert "outer" in said
    assert "inner" in said
    assert "waits for Future" in said


def test_there_are_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "MAX_THREADS", 1)
    monkeypatch.setattr(stack_dump, "MAX_FRAMES", 2)
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, args=(30,), daemon=True)
    thread.start()
    try:
        lines = list(stack_dump.stacks())
    finally:
        go_on.set()
        thread.join()
    assert sum(line.startswith("thread ") for line in lines) == 1
    assert sum(line.startswith("  ") for line in lines) == 2
    assert any(line.endswith("threads more") for line in lines)


def test_who_holds_the_interpreter_is_seen_all_the_same() -> None:
    """The short dump comes while it is held, the full one after."""
    process = subprocess.Popen(
        [sys.executable, "-c", HELD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        out, error = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert out == "awake\n"
    short, full = error.index("most recent call first"), error.index("thread 'MainThread'")
    assert short < full


@pytest.mark.timeout(180)
def test_router_and_workers_tell_and_go_on(smollm2: Path, tmp_path: Path) -> None:
    """Each process of a stack; it serves as before."""
    log = tmp_path / "stack.log"
    with Stack.running(str(smollm2), log) as stack:
        for child in stack.children:
            assert child.process is not None
            child.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: log.read_text().count("--- end") == 3, 30)
        body = {"model": "smol", "prompt": "Hi", "max_tokens": 2}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=30)
        assert answer.status_code == 200
    text = log.read_text()
    for words in ("kv-control", "kv-transfer", "tandem-io", "task 'discovery'"):
        assert words in text, words
