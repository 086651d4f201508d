"""Commands to an engine other than requests."""

from enum import StrEnum

import msgspec


class CommandName(StrEnum):
    """Commands that an EngineCore knows."""

    RESET_PREFIX_CACHE = "reset_prefix_cache"
    """Drop every cached block that is not in use; refused while leases are out."""
    STATS = "stats"
    """Counters and gauges of the engine."""
    DRAIN = "drain"
    """Refuse new requests, and finish running ones."""
    SLEEP = "sleep"
    """Free memory until ``WAKE_UP``. Repeated until no request runs (see ``SleepMode``)."""
    WAKE_UP = "wake_up"
    """Allocate the memory again, all of it or the parts in ``tags``."""
    IS_SLEEPING = "is_sleeping"
    """Report whether the engine sleeps."""
    START_PROFILE = "start_profile"
    """Record steps until ``STOP_PROFILE``; refused if no folder is set for it."""
    STOP_PROFILE = "stop_profile"
    """Write the record; the reply's message is the file."""


class SleepMode(StrEnum):
    """Treatment of running requests when an engine is put to sleep."""

    ABORT = "abort"
    """Abort them at once."""
    WAIT = "wait"
    """Let them finish; new requests are refused."""


class SleepTag(StrEnum):
    """Parts of the engine's memory that a wake-up can restore."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


SLEEP_LEVELS = (1, 2)
"""1 keeps weights in host memory; 2 drops them and loads them again. Both drop all KV."""
MAX_SLEEP_WAIT_S = 600.0
"""Maximum seconds for requests to finish before an engine sleeps."""
MEMORY_SECONDS = 600.0
"""Deadline of a command that moves weights."""
PROFILE_SECONDS = 120.0
"""Deadline for starting or writing a profile."""


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call; ``id`` pairs it with its reply."""

    id: int
    name: CommandName
    args: dict[str, str | int | float | bool] = {}


def seconds_for(command: Command, usual: float) -> float:
    """Return the deadline of a command in seconds; ``usual`` applies to short ones."""
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
