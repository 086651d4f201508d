"""What an operator asks of an engine beside requests: one small command, one reply."""

from enum import StrEnum

import msgspec


class CommandName(StrEnum):
    """Commands that an EngineCore knows."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """Drop every cached block that no request holds; refused while leases are out."""
    STATS = "stats"
    """Counters and gauges of the engine, for tests and ``/debug``."""
    DRAIN = "drain"
    """Take nothing new, finish what runs."""
    SLEEP = "sleep"
    """Give memory back until ``WAKE_UP``; asked again until all is quiet (see ``SleepMode``)."""
    WAKE_UP = "wake_up"
    """Take memory again, all of it or what ``tags`` name."""
    IS_SLEEPING = "is_sleeping"
    """Whether the engine sleeps, as ``SLEEP`` counts it."""
    START_PROFILE = "start_profile"
    """Record what steps do, until ``STOP_PROFILE``; refused where no folder is set for it."""
    STOP_PROFILE = "stop_profile"
    """Write what was recorded since ``START_PROFILE``; the reply's message is the file."""


class SleepMode(StrEnum):
    """What becomes of requests that run when an engine is put to sleep."""

    ABORT = "abort"
    """They end at once."""
    WAIT = "wait"
    """They come to their end; nothing new is taken meanwhile."""


class SleepTag(StrEnum):
    """What an engine takes again when it wakes up."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


SLEEP_LEVELS = (1, 2)
"""1 keeps weights in host memory, 2 drops them and loads them anew; both drop all KV."""
MAX_SLEEP_WAIT_S = 600.0
"""Longest time in which requests may come to their end before an engine sleeps."""
MEMORY_SECONDS = 600.0
"""A command that moves weights must be answered within this."""
PROFILE_SECONDS = 120.0
"""A profile must have begun, or be written, within this: the first loads a library."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call; ``id`` pairs it with its reply."""

    id: int
    name: CommandName
    args: dict[str, str | int | float | bool] = {}


def seconds_for(command: Command, usual: float) -> float:
    """How long an engine may take to answer, if ``usual`` is it for what moves no memory and
    writes no file."""
    if command.name in (CommandName.SLEEP, CommandName.WAKE_UP):
        return MEMORY_SECONDS
    profiles = command.name in (CommandName.START_PROFILE, CommandName.STOP_PROFILE)
    return PROFILE_SECONDS if profiles else usual


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command."""

    id: int
    ok: bool
    message: str = ""
    values: dict[str, float] = {}
