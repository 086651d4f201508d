"""Stack dumps: on SIGUSR1 a process writes the stacks of its threads and tasks.

A short form is written at once without the interpreter, the full form when the main thread runs
Python.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

STANDARD_ERROR = 2
MAX_THREADS = 256
MAX_TASKS = 128
MAX_FRAMES = 48
MAX_AWAITS = 24
_STATES = {"R": "runs", "S": "waits", "D": "waits for a device", "T": "stopped"}


def dump_on_signal() -> None:
    """Install the handler, from the main thread, if there is SIGUSR1."""
    if not hasattr(signal, "SIGUSR1"):
        return
    signal.signal(signal.SIGUSR1, _dump)
    # Its handler runs first and calls the one above.
    faulthandler.register(signal.SIGUSR1, file=STANDARD_ERROR, all_threads=True, chain=True)


def _dump(_number: int, frame: FrameType | None) -> None:
    """Write the dump unbuffered: the stream may be in use."""
    words = memoryview("\n".join([*stacks(frame), ""]).encode(errors="replace"))
    try:
        while words:
            words = words[os.write(STANDARD_ERROR, words) :]
    except OSError:
        return  # the reader has closed


def stacks(interrupted: FrameType | None = None) -> Iterator[str]:
    """Yield every thread with its stack, then the tasks of this thread's loop.

    ``interrupted``: this thread's frame at the signal.
    """
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    yield f"--- where {os.getpid()} stands, {now}: {' '.join(sys.argv)[:200]}"
    frames = sys._current_frames()
    if interrupted is not None:
        frames[threading.get_ident()] = interrupted
    known = {each.ident: each for each in threading.enumerate()}
    for ident, frame in list(frames.items())[:MAX_THREADS]:
        yield from _thread(known.get(ident), ident, frame)
    if len(frames) > MAX_THREADS:
        yield f"{len(frames) - MAX_THREADS} threads more"
    yield from _tasks()
    yield "--- end"


def _thread(thread: threading.Thread | None, ident: int, frame: FrameType) -> Iterator[str]:
    name = "not Python's own" if thread is None else thread.name
    native = None if thread is None else thread.native_id
    yield f"thread {name!r} ({ident:#x}{_state(native)})"
    walked = traceback.walk_stack(frame)
    kept = traceback.StackSummary.extract(walked, limit=MAX_FRAMES)
    kept.reverse()
    for each in kept:
        yield f"  {each.filename}:{each.lineno} in {each.name}: {each.line or ''}".rstrip(": ")


def _state(native: int | None) -> str:
    """Return the kernel's state of a thread, or ""."""
    try:
        text = Path(f"/proc/self/task/{native}/stat").read_text()
    except OSError:
        return ""
    state = text.rpartition(")")[2].split()[0]
    return f", task {native} {_STATES.get(state, state)}"


def _tasks() -> Iterator[str]:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:
        return  # no loop in this thread
    yield f"{len(tasks)} tasks of the loop"
    for task in sorted(tasks, key=lambda each: each.get_name())[:MAX_TASKS]:
        yield f"task {task.get_name()!r}"
        yield from _awaits(task.get_coro())


def _awaits(waiting: Any) -> Iterator[str]:
    """Yield the chain of awaits, outermost first."""
    for _ in range(MAX_AWAITS):
        if not isinstance(waiting, CoroutineType):
            break
        frame = waiting.cr_frame
        if frame is not None:
            yield f"  {frame.f_code.co_filename}:{frame.f_lineno} in {waiting.__qualname__}"
        waiting = waiting.cr_await
    if waiting is not None:
        yield f"  waits for {type(waiting).__name__}"
