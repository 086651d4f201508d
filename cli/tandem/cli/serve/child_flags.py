"""Checks of the flags of a local stack's processes, before the model is prepared.

They use the processes' own parsers and config classes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tandem.base.settings import settings_of
from tandem.cli.serve.listening import LOOPBACK
from tandem.cli.settings.command import UsageError, read_command_line
from tandem.cli.settings.flags import Section
from tandem.cli.settings.worker_settings import engine_values, worker_sections
from tandem.engine.config import EngineConfig
from tandem.engine.config.engine import SECTIONS, defaults_of, resolve_device
from tandem.kvtransfer.config import KVTransferConfig
from tandem.prefill.config import PrefillConfig
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.router.config import RouterConfig
from tandem.router.limits import with_limits
from tandem.worker.server_config import ServerConfig

OF_WORKERS = frozenset({
    "--model", "--port", "--probe-port", "--kv-control-port", "--kv-data-port",
})  # fmt: skip
"""Flags that the stack sets for each worker."""
OF_ROUTER = frozenset({"--model", "--host", "--port"})
"""Flags that the stack sets for the router, from its own."""
_WITH_LOOPBACK = (LOOPBACK, "localhost", "0.0.0.0", "::")


class ChildFlagsError(UsageError):
    """A process of the stack would refuse its flags."""

    def __init__(self, text: str) -> None:
        TandemError.__init__(self, text)


def check_worker(
    role: str, flags: list[str], environ: Mapping[str, str]
) -> tuple[ServerConfig, dict[str, Any]]:
    """Return the server's settings, and the given engine settings. Raises ChildFlagsError."""
    given = _read(role, flags, environ)
    engine = engine_values(given)
    with named(role):
        KVTransferConfig(**given[KVTransferConfig])
        PrefillConfig(**given.get(PrefillConfig, {}))
        device = resolve_device(given[EngineConfig].get("device", "auto"))
        usual = defaults_of(device)
        for settings in SECTIONS.values():
            own = {each.name for each in settings_of(settings)}
            settings(
                **{name: value for name, value in usual.items() if name in own} | given[settings]
            )
        return ServerConfig(**given[ServerConfig]), engine


def check_kept(role: str, arguments: Sequence[str]) -> None:
    """Raise ChildFlagsError for a flag that the stack sets itself."""
    given = Counter(word.partition("=")[0] for word in arguments)
    for flag in sorted(OF_ROUTER if role == "router" else OF_WORKERS):
        if given[flag] < 2:
            continue
        why = f"give {flag} to the stack itself"
        if role != "router" and flag != "--model":
            why = "each worker of a stack is given free ports"
        raise ChildFlagsError(f"flags of {_whose(role)}: {flag} is not allowed here; {why}")


def check_host(role: str, host: str) -> None:
    """Raise ChildFlagsError for a worker's address outside the loopback."""
    if host not in _WITH_LOOPBACK:
        allowed = ", ".join(_WITH_LOOPBACK)
        error = InvalidParameter("host", host, f"one of {allowed}: the stack is on the loopback")
        raise ChildFlagsError(f"flags of {_whose(role)}: {error}")


def check_router(flags: list[str], environ: Mapping[str, str]) -> RouterConfig:
    """Return the router's settings. Raises ChildFlagsError."""
    given = _read("router", flags, environ)
    with named("router"):
        return RouterConfig(**with_limits(given[RouterConfig], environ))


def sections_of(role: str) -> list[Section]:
    """Return the sections of flags of a process."""
    if role == "router":
        from tandem.cli.serve.router import router_sections

        return router_sections()
    own = [Section("Prefill", PrefillConfig)] if role == "prefill" else []
    return [*worker_sections(), *own]


def _read(role: str, flags: list[str], environ: Mapping[str, str]) -> dict[type, dict[str, Any]]:
    with named(role):
        return read_command_line(role, "", sections_of(role), flags, environ)


def _whose(role: str) -> str:
    return "the router" if role == "router" else f"{role} workers"


@contextmanager
def named(role: str) -> Iterator[None]:
    """Add the process name to errors about its flags."""
    try:
        yield
    except (InvalidParameter, UsageError) as error:
        raise ChildFlagsError(f"flags of {_whose(role)}: {error}") from error
