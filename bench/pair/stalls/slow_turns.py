"""What a worker's step loop does while it stands: turns of over 18 ms in their parts.

Called by this folder's ``install`` within a worker. A turn is from one look at the inbox to the
next; how long it slept there, because it had nothing to do, is no part of it. What a turn's notes
say of the step that it waited for and the one that it launched, and what torch asked its device
for, is looked up only when the turn was slow.
"""

from __future__ import annotations

import functools
import importlib
import resource
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from bench.pair import imports
from bench.pair.stalls.device_calls import Allocations, how_run, tell
from bench.pair.stalls.watcher import LATE_SECONDS, Notes, Quiet, Watcher

SLOW_SECONDS = 0.018
SECONDS_A_TOKEN = 5e-5
"""What a step's prompt tokens may take, beside ``SLOW_SECONDS``, before its wait is looked at."""


class StepHeart:
    """A step loop: in which part of a turn it is, and since when."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.part = "loading"
        self.rests = True
        """Whether it has nothing to do."""
        self.prompt_tokens: Callable[[], int] = int
        """Of the step that is waited for."""

    def stands(self, now: float) -> tuple[float, str]:
        """See Heart. A prompt's step may take its time on the device."""
        at, part = self.at, self.part
        over = now - at - LATE_SECONDS
        if self.rests or over <= 0:
            return 0.0, part
        usual = SLOW_SECONDS - LATE_SECONDS + self.prompt_tokens() * SECONDS_A_TOKEN
        if part == "wait" and over <= usual:
            return 0.0, part
        return over, f"the part {part!r} of the step loop"


class Turns:
    """The step loop's turns, timed from within its thread."""

    def __init__(self, notes: Notes) -> None:
        self.notes, self.heart = notes, StepHeart()
        self.allocations = Allocations(notes)
        self._parts: dict[str, float] = {}
        self._inner = 0.0
        """Seconds of parts that ended within the one that is open."""
        self._began = time.monotonic()
        self._usage = resource.getrusage(resource.RUSAGE_THREAD)
        self._launched: Any = None
        self._awaited: Any = None
        self._core: Any = None
        self.heart.prompt_tokens = lambda: _prompt_tokens(self._awaited)

    def part(self, owner: Any, name: str, part: str, before: Callable[..., None] | None) -> None:
        """Have the time of a method counted as that part of its turn, less what other parts within
        it take; ``before`` is called with its arguments first."""
        was, heart, parts = getattr(owner, name), self.heart, self._parts

        @functools.wraps(was)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before(*args)
            outer, outer_inner = heart.part, self._inner
            began = heart.at = time.monotonic()
            heart.part, self._inner = part, 0.0
            try:
                return was(*args, **kwargs)
            finally:
                heart.at = now = time.monotonic()
                parts[part] = parts.get(part, 0.0) + now - began - self._inner
                heart.part, self._inner = outer, outer_inner + now - began

        setattr(owner, name, timed)

    def begin(self, proc: Any, **_kwargs: Any) -> None:
        """The loop comes round: the last turn is over."""
        now, heart = time.monotonic(), self.heart
        self._core = proc._core
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        took = now - self._began - self._parts.get("sleep", 0.0)
        if took > SLOW_SECONDS and not (heart.rests and heart.part == "loading"):
            self.notes.put(now - took, now, "turn", self._told(took, usage))
        self._parts.clear()
        self._usage, self._launched, self._awaited = usage, None, None
        heart.rests, heart.part = False, "between"
        self._began = heart.at = time.monotonic()

    def launches(self, _executor: Any, plan: Any, *_args: Any) -> None:
        """A plan goes to the device."""
        self._launched = plan

    def updates(self, core: Any) -> None:
        """The oldest step in flight is waited for."""
        self._awaited = core._in_flight[0][0]

    def sleeps(self, owner: Any, name: str) -> None:
        """Have a method counted as sleep. One that sleeps for long beside streams is noted."""
        was, heart, parts = getattr(owner, name), self.heart, self._parts

        @functools.wraps(was)
        def slept(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            heart.rests = True
            try:
                return was(*args, **kwargs)
            finally:
                heart.rests = False
                heart.at = now = time.monotonic()
                parts["sleep"] = parts.get("sleep", 0.0) + now - began
                self._inner += now - began
                if now - began > LATE_SECONDS:
                    self._slept(began, now)

        setattr(owner, name, slept)

    def _slept(self, began: float, now: float) -> None:
        streams = self._core.scheduler.decoding.streams
        if streams:
            text = f"nothing to compute for {1e3 * (now - began):.1f} ms beside {streams} streams"
            self.notes.put(began, now, "sleep", text)

    def _told(self, took: float, usage: resource.struct_rusage) -> str:
        was = self._usage
        parts = ", ".join(
            f"{part} {1e3 * seconds:.1f}"
            for part, seconds in self._parts.items()
            if part != "sleep" and seconds >= 5e-5
        )
        cpu = usage.ru_utime + usage.ru_stime - was.ru_utime - was.ru_stime
        aside, faults = usage.ru_nivcsw - was.ru_nivcsw, usage.ru_minflt - was.ru_minflt
        told = [
            f"a turn took {1e3 * took:.1f} ms: {parts}",
            f"its thread used {1e3 * cpu:.1f} ms of CPU and was put aside {aside} times",
            f"page faults {faults}, from disk {usage.ru_majflt - was.ru_majflt}",
        ]
        if self._awaited is not None:
            told.append(f"waited for {_shown(self._awaited)}")
        if self._launched is not None and self._launched is not self._awaited:
            told.append(f"launched {_shown(self._launched)}")
        stats = self._core.scheduler.make_stats()
        told.append(
            f"now {stats.running} run, {stats.waiting} wait, {stats.parked} are parked,"
            f" {stats.loading} load KV"
        )
        told.append(self.allocations.changed())
        return "; ".join(each for each in told if each)


def _prompt_tokens(plan: Any) -> int:
    return 0 if plan is None else sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)


def _shown(plan: Any) -> str:
    chunks = [row.num_tokens for row in plan.rows if row.num_tokens > 1]
    return (
        f"step {plan.step} ({len(plan.rows) - len(chunks)} decodes, {sum(chunks)} prompt tokens in"
        f" {len(chunks)} chunks{how_run(plan.step)})"
    )


def watch(notes: Notes, engine_proc: ModuleType) -> None:
    """In a worker's main thread: time its step loop from now on, and have a thread watch it."""
    tell(notes)
    turns = Turns(notes)
    scheduler = importlib.import_module("tandem.engine.scheduler.scheduler").Scheduler
    uniproc = importlib.import_module("tandem.engine.executor.uniproc")
    core, proc = engine_proc.EngineCore, engine_proc.EngineCoreProc
    turns.part(proc, "_receive", "receive", turns.begin)
    turns.sleeps(engine_proc.IOThread, "attend")
    turns.part(scheduler, "plan", "plan", None)
    turns.part(uniproc.UniProcExecutor, "execute", "launch", turns.launches)
    turns.part(core, "_update", "update", turns.updates)
    turns.part(uniproc.StepFuture, "result", "wait", None)
    turns.part(uniproc.StepFuture, "wait_nearly", "wait", None)
    quiet = Quiet(notes, "told routers no tokens")
    streams = imports.role() == "decode"  # a prefill worker says a token now and then
    told = (lambda _, outputs: quiet.came() if outputs.outputs else None) if streams else None
    turns.part(proc, "_send", "send", told)
    turns.part(core, "observe", "observe", None)
    watcher = Watcher(notes, turns.heart)
    watcher.now_and_then.append(turns.allocations.look)
    watcher.start()
