"""What an EngineCore answers to each command, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tandem.protocol.commands import Command, CommandName, Reply
from tandem.protocol.errors import TandemError

if TYPE_CHECKING:
    from tandem.engine.core.engine_core import EngineCore


def reset_prefix_cache(core: EngineCore, command: Command) -> Reply:
    """Drop cached blocks that nobody holds; refused while KV is promised."""
    if core.scheduler.has_promises:
        message = "KV is promised to a peer or on its way from one; try again later"
        return Reply(id=command.id, ok=False, message=message)
    dropped = core.manager.reset_prefix_cache()
    return Reply(id=command.id, ok=True, values={"dropped_blocks": dropped})


def drain(core: EngineCore, command: Command) -> Reply:
    """Take nothing new."""
    core.drain()
    return Reply(id=command.id, ok=True)


def stats(core: EngineCore, command: Command) -> Reply:
    """Gauges and counters."""
    return Reply(id=command.id, ok=True, values=core.stats())


def start_profile(core: EngineCore, command: Command) -> Reply:
    """Record what steps do from now on."""
    folder = core.config.profiler.torch_profiler_dir
    if folder is None:
        message = "profiles have no folder: the engine was started without --torch-profiler-dir"
        return Reply(id=command.id, ok=False, message=message)
    return _profile(core, command, folder)


def stop_profile(core: EngineCore, command: Command) -> Reply:
    """Write what was recorded."""
    return _profile(core, command, None)


def _profile(core: EngineCore, command: Command, folder: str | None) -> Reply:
    try:
        return Reply(id=command.id, ok=True, message=core.profile(folder))
    except TandemError as error:
        return Reply(id=command.id, ok=False, message=str(error))


ANSWERS: Mapping[CommandName, Callable[[EngineCore, Command], Reply]] = {
    CommandName.RESET_PREFIX_CACHE: reset_prefix_cache,
    CommandName.DRAIN: drain,
    CommandName.STATS: stats,
    CommandName.START_PROFILE: start_profile,
    CommandName.STOP_PROFILE: stop_profile,
    CommandName.SLEEP: lambda core, command: core.sleep.fall(command),
    CommandName.WAKE_UP: lambda core, command: core.sleep.wake(command),
    CommandName.IS_SLEEPING: lambda core, command: core.sleep.state(command),
}
