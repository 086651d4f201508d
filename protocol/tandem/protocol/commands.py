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


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """One call; ``id`` pairs it with its reply."""

    id: int
    name: CommandName
    args: dict[str, str | int | float | bool] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a command."""

    id: int
    ok: bool
    message: str = ""
    values: dict[str, float] = {}
