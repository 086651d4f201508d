"""Sleep of an engine: refuse new requests, let the running ones end, free memory.

Nothing waits here; the caller repeats the command. A sleep that has not begun by its deadline is
cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.executor.base import Executor
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.protocol.commands import (
    MAX_SLEEP_WAIT_S,
    SLEEP_LEVELS,
    Command,
    Reply,
    SleepMode,
    SleepTag,
)
from tandem.protocol.errors import FailCause, InvalidParameter, TandemError

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """Parts of EngineCore that ``Sleep`` uses."""

    scheduler: Scheduler
    manager: KVCacheManager
    draining: bool

    @property
    def has_work(self) -> bool: ...


class Sleeper(Protocol):
    """Owner of memory for KV transfers, which sleeps with the engine."""

    def sleep(self) -> int:
        """Free the memory; return its bytes."""
        ...

    def wake_up(self) -> None:
        """Allocate the memory again."""
        ...


class Sleep:
    """State of one engine's sleep."""

    def __init__(self, engine: Engine, executor: Executor, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._executor = executor
        self._until: float | None = None
        """Deadline by which requests may end, while a sleep is requested."""
        self._level = 0
        self._freed = 0
        self._asleep: frozenset[SleepTag] = frozenset()
        self.keeps_awake: Callable[[], str | None] = lambda: None
        """Returns why KV transfers outside the engine keep the memory; None if they do not."""
        self.beside: Sleeper | None = None
        """Owner of KV transfers outside the engine."""

    @property
    def refuses(self) -> bool:
        return bool(self._asleep) or (self._until is not None and self._clock() < self._until)

    def state(self, command: Command) -> Reply:
        """Return the number of engines (one), and of those that sleep."""
        return self._reply(command)

    def fall(self, command: Command) -> Reply:
        """Sleep if the engine is idle, else let its requests end; the reply's ``asleep`` states
        which."""
        try:
            level, mode, seconds = _asked(command)
        except InvalidParameter as error:
            return _no(command, str(error))
        if self._asleep:
            if level != self._level:
                return _no(command, f"asleep at level {self._level} already; wake up first")
            whole = self._asleep == frozenset(SleepTag)
            return self._reply(command) if whole else self._give_back(command, level)
        why = "the worker is on its way out" if self._engine.draining else self.keeps_awake()
        if why is not None:
            self._until = None
            return _no(command, why)
        if not self.refuses:
            self._until = self._clock() + seconds
        if mode is SleepMode.ABORT:
            self._end_all()
        if self._engine.has_work:
            return self._reply(command)
        return self._give_back(command, level)

    def wake(self, command: Command) -> Reply:
        """Wake the named parts, all by default, and cancel a sleep that has not begun."""
        self._until = None
        named = str(command.args.get("tags", ""))
        try:
            tags = [SleepTag(each) for each in named.split(",")] if named else list(SleepTag)
        except ValueError:
            return _no(command, f"tags: {named[:80]!r} is not allowed; {', '.join(SleepTag)}")
        wanted = [each for each in tags if each in self._asleep]
        for tag in wanted:
            try:
                self._executor.wake_up([tag])
            except (TandemError, RuntimeError, OSError) as error:
                logger.exception("%s could not be taken again", tag)
                return _no(command, f"{tag} could not be taken again: {error}")
            self._asleep -= {tag}
        if wanted and not self._asleep and self.beside is not None:
            self.beside.wake_up()
        return self._reply(command)

    def _give_back(self, command: Command, level: int) -> Reply:
        self._engine.manager.reset_prefix_cache()
        try:
            given = self._executor.sleep(level)
        except (TandemError, RuntimeError) as error:
            logger.exception("no memory could be given back")
            self._until = None
            return _no(command, str(error))
        if not self._asleep:  # else parts sleep already
            given += 0 if self.beside is None else self.beside.sleep()
            self._until, self._level, self._freed = None, level, given
        self._asleep = frozenset(SleepTag)
        return self._reply(command)

    def _end_all(self) -> None:
        scheduler, now = self._engine.scheduler, self._clock()
        request_table = scheduler.request_table
        for group in list(request_table.groups.values()):
            request_table.fail(group, FailCause.ASLEEP, "the worker was put to sleep", now)
        for key in scheduler.held_keys():
            scheduler.abort(key)
        request_table.sweep()

    def _reply(self, command: Command) -> Reply:
        asleep = bool(self._asleep)
        values = {"engines": 1.0, "asleep": float(asleep)}
        if asleep:  # in every answer: others may sleep later
            values["freed_bytes"] = float(self._freed)
        return Reply(id=command.id, ok=True, values=values)


def _asked(command: Command) -> tuple[int, SleepMode, float]:
    """Return level, mode and seconds. Raises InvalidParameter that names the error."""
    args = command.args
    level, mode = args.get("level", 1), args.get("mode", SleepMode.ABORT)
    seconds = args.get("timeout_s", MAX_SLEEP_WAIT_S)
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise InvalidParameter("level", level, f"one of {', '.join(map(str, SLEEP_LEVELS))}")
    if mode not in set(SleepMode):
        raise InvalidParameter("mode", mode, f"one of {', '.join(SleepMode)}")
    if isinstance(seconds, str) or not 0 <= seconds <= MAX_SLEEP_WAIT_S:
        raise InvalidParameter("timeout_s", seconds, f"seconds from 0 to {MAX_SLEEP_WAIT_S:g}")
    return int(level), SleepMode(mode), float(seconds)


def _no(command: Command, message: str) -> Reply:
    return Reply(id=command.id, ok=False, message=message)
