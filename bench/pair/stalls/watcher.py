"""A process's notes of when it stood still, and the thread that looks where."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

WAKE_SECONDS = 0.002
LATE_SECONDS = 0.012
"""For which somebody stands before it is looked where."""
AGAIN_SECONDS = 0.006
"""From one such look to the next."""
LOOKS = 3
"""At one stall. Each takes the interpreter for 1 to 2 ms."""
LOOKS_A_SECOND, LOOKS_AT_ONCE = 10.0, 30.0
"""More are left out, so that a process that is always slow is not slowed down much."""
HELD_SECONDS = 0.005
"""By which the watching thread itself is late before it says so."""
PASS_SECONDS = 0.002
LOOP_SECONDS = 0.008
"""By which an event loop's timer is late before it is noted."""
BEAT_SECONDS = 0.004
QUIET_SECONDS, PAUSE_SECONDS = 0.02, 1.0
"""Between frames of a worker to a router: what is noted lies between these."""
WRITE_SECONDS = 0.25
COST_SECONDS = 2.0
KEPT = 20_000
"""Notes that wait to be written, at most."""
DEPTH, DEPTH_BESIDE = 10, 4
"""Frames that are said of the watched thread, and of others."""
MAIN = "the watched thread"
THREAD = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)")
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\S+) in (?P<function>.*)')


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


class Quiet:
    """Notes when what usually comes did not come for a while. A longer one is a pause: nothing was
    to come."""

    def __init__(self, notes: Notes, what: str) -> None:
        self._notes, self._what = notes, what
        self._last = time.monotonic()

    def came(self) -> None:
        """It came."""
        now, last = time.monotonic(), self._last
        self._last = now
        if QUIET_SECONDS < now - last < PAUSE_SECONDS:
            text = f"{self._what} for {1e3 * (now - last):.1f} ms"
            self._notes.put(last, now, "quiet", text)


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
        self._stacks = Stacks()
        self._seen = 0
        """Looks at the stall that there is now."""
        self._looks, self._left_out = LOOKS_AT_ONCE, 0
        """Looks that it may take by now, and those that it might not."""
        self._looked = time.monotonic()
        self._over = False
        self.now_and_then: list[Callable[[], None]] = []
        """Called every ``WRITE_SECONDS``."""

    def stop(self) -> None:
        """End, once what was noted is written."""
        self._over = True
        self.join()
        self._stacks.close()

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
                    text = f"the watcher woke {wakes} times, used {1e3 * cpu:.0f} ms of CPU"
                    text += f", left out {self._left_out} looks"
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
        earned = LOOKS_A_SECOND * (now - self._looked)
        self._looks, self._looked = min(LOOKS_AT_ONCE, self._looks + earned), now
        if self._looks < 1.0:
            self._left_out += 1
            return
        self._looks -= 1.0
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        found = self._stacks.look()
        found.pop(threading.get_ident(), None)
        told = [when, f"{MAIN}: {' < '.join(found.pop(self._main, [])[:DEPTH])}"]
        told += [
            f"{names.get(ident, ident)}: {' < '.join(places[:DEPTH_BESIDE])}"
            for ident, places in found.items()
        ]
        self._notes.put(at, now, "stack", "\n".join(told))


class Stacks:
    """Where the threads of this process are, as faulthandler says: it makes no objects of frames.
    Walking those of ``sys._current_frames`` while their threads go on crashed CPython 3.11."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("stacks"), "w+b", buffering=0)

    def look(self) -> dict[int, list[str]]:
        """Of each thread, the innermost place first."""
        self._file.seek(0)
        self._file.truncate()
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.seek(0)
        return parsed(self._file.readall().decode(errors="replace"))

    def close(self) -> None:
        """Give the memory back."""
        self._file.close()


def parsed(text: str) -> dict[int, list[str]]:
    """What faulthandler has written, by thread: ``function folder/file:line``."""
    found: dict[int, list[str]] = {}
    places: list[str] = []
    for line in text.splitlines():
        thread, frame = THREAD.match(line), FRAME.match(line)
        if thread is not None:
            places = found.setdefault(int(thread[1], 16), [])
        elif frame is not None:
            file = "/".join(frame["file"].rsplit("/", 2)[-2:])
            places.append(f"{frame['function']} {file}:{frame['line']}")
    return found
