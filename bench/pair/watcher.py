"""A process's notes of when it stood still, and the thread that looks where. See ``stalls.py``."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol

WAKE_SECONDS = 0.002
LATE_SECONDS = 0.012
"""For which somebody stands before it is looked where."""
AGAIN_SECONDS = 0.006
"""From one such look to the next."""
LOOKS = 3
HELD_SECONDS = 0.005
"""By which the watching thread itself is late before it says so."""
PASS_SECONDS = 0.002
LOOP_SECONDS = 0.008
"""By which an event loop's timer is late before it is noted."""
BEAT_SECONDS = 0.004
WRITE_SECONDS = 0.25
COST_SECONDS = 2.0
KEPT = 20_000
"""Notes that wait to be written, at most."""
DEPTH, DEPTH_BESIDE = 10, 4
"""Frames that are said of the watched thread, and of others."""
MAIN = "the watched thread"


class Heart(Protocol):
    """Whom a watcher watches."""

    def stands(self, now: float) -> tuple[float, str]:
        """For how many seconds over what is usual, and in what; 0 if it is well."""


class Notes:
    """What a process has noted and not written yet. Any thread; ``put`` takes a microsecond."""

    def __init__(self, who: str, folder: Path) -> None:
        self.who = f"{who} {os.getpid()}"
        self._path = folder / f"{os.getpid()}.stalls"
        self._waiting: deque[tuple[float, float, str, str]] = deque(maxlen=KEPT)
        self.put(time.monotonic(), time.monotonic(), "here", "watched from here on")

    def put(self, at: float, end: float, kind: str, text: str) -> None:
        """Something took from ``at`` to ``end``."""
        self._waiting.append((at, end, kind, text))

    def write(self) -> None:
        """Append to the file what waits."""
        if not self._waiting:
            return
        lines = []
        while self._waiting:
            at, end, kind, text = self._waiting.popleft()
            line = {"who": self.who, "at": at, "end": end, "kind": kind, "text": text}
            lines.append(json.dumps(line) + "\n")
        with self._path.open("a") as file:
            file.writelines(lines)


class LoopHeart:
    """An event loop, by a timer of its own."""

    def __init__(self, notes: Notes, loop: asyncio.AbstractEventLoop) -> None:
        self._notes, self._loop = notes, loop
        self._due = time.monotonic() + BEAT_SECONDS
        loop.call_later(BEAT_SECONDS, self._beat)

    def _beat(self) -> None:
        now, due = time.monotonic(), self._due
        if now - due > LOOP_SECONDS:
            text = f"the event loop came round {1e3 * (now - due):.1f} ms late"
            self._notes.put(due, now, "loop", text)
        self._due = time.monotonic() + BEAT_SECONDS
        self._loop.call_later(BEAT_SECONDS, self._beat)

    def stands(self, now: float) -> tuple[float, str]:
        """See Heart."""
        return max(0.0, now - self._due - LATE_SECONDS), "a turn of the event loop"


class Collector:
    """Notes passes of the collector of garbage, which hold the interpreter."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._began = 0.0
        gc.callbacks.append(self._called)

    def stop(self) -> None:
        """Note no more."""
        gc.callbacks.remove(self._called)

    def _called(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
            return
        now, began = time.monotonic(), self._began
        if now - began > PASS_SECONDS:
            thread = threading.current_thread().name
            text = (
                f"collector, generation {about['generation']}: {1e3 * (now - began):.1f} ms in"
                f" {thread}, {about['collected']} objects collected"
            )
            self._notes.put(began, now, "gc", text)


class Watcher(threading.Thread):
    """Looks where threads stand while ``heart`` does, and writes what was noted."""

    def __init__(self, notes: Notes, heart: Heart) -> None:
        super().__init__(name="stalls-watcher", daemon=True)
        self._notes, self._heart = notes, heart
        self._main = threading.get_ident()
        """The thread of the heart: who makes this."""
        self._seen = 0
        """Looks at the stall that there is now."""
        self._over = False
        self.now_and_then: list[Callable[[], None]] = []
        """Called every ``WRITE_SECONDS``."""

    def stop(self) -> None:
        """End, once what was noted is written."""
        self._over = True
        self.join()

    def run(self) -> None:
        """Until ``stop``, which a process that lives as long as it does never calls."""
        wakes, spoke, written = 0, time.monotonic(), time.monotonic()
        while not self._over:
            due, used = time.monotonic() + WAKE_SECONDS, time.process_time()
            time.sleep(WAKE_SECONDS)
            now = time.monotonic()
            wakes += 1
            if now - due > HELD_SECONDS:
                self._held(due, now, time.process_time() - used)
            else:
                self._look(now)
            if now - written > WRITE_SECONDS:
                written = now
                for each in self.now_and_then:
                    each()
                if now - spoke > COST_SECONDS:
                    spoke, cpu = now, time.thread_time()
                    text = f"the watcher woke {wakes} times and used {1e3 * cpu:.0f} ms of CPU"
                    self._notes.put(now, now, "cost", text)
                self._notes.write()
        self._notes.write()

    def _held(self, due: float, now: float, used: float) -> None:
        late = 1e3 * (now - due)
        text = f"the watcher came {late:.1f} ms late, the process used {1e3 * used:.1f} ms of CPU"
        self._notes.put(due, now, "held", text)
        self._say_where(due, now, "as the watcher came in")

    def _look(self, now: float) -> None:
        over, part = self._heart.stands(now)
        if not over:
            self._seen = 0
        elif self._seen < LOOKS and over >= self._seen * AGAIN_SECONDS:
            self._seen += 1
            since = now - over - LATE_SECONDS
            self._say_where(since, now, f"{1e3 * (now - since):.0f} ms in {part}")

    def _say_where(self, at: float, now: float, when: str) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        found = [when, f"{MAIN}: {stack_of(frames.pop(self._main, None), DEPTH)}"]
        frames.pop(threading.get_ident(), None)
        found += [
            f"{names.get(ident, ident)}: {stack_of(frame, DEPTH_BESIDE)}"
            for ident, frame in frames.items()
        ]
        self._notes.put(at, now, "stack", "\n".join(found))


def stack_of(frame: FrameType | None, depth: int) -> str:
    """The innermost frames, the very innermost first."""
    places: list[str] = []
    while frame is not None and len(places) < depth:
        places.append(f"{_place(frame.f_code)}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)


def _place(code: CodeType) -> str:
    return f"{code.co_qualname} {'/'.join(code.co_filename.rsplit('/', 2)[-2:])}"
