"""Flags of workers and router on the command line of `tandem up` and `tandem serve`.

``--max-num-seqs 64`` is for every worker, ``--prefill.max-num-seqs 64`` for one role. The former
are passed by the environment: every user can read command lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.cli.serve.child_flags import sections_of
from tandem.cli.settings.command import RefusedFlag, UsageError, with_routers
from tandem.cli.settings.flags import Section, flag_of, plain_type
from tandem.cli.settings.worker_settings import worker_sections
from tandem.prefill.config import PrefillConfig
from tandem.protocol.names import ENV_PREFIX

ROLES = ("prefill", "decode", "router")
FILLED = frozenset({
    "model", "revision", "served_model_name", "host", "port", "probe_port", "log_level",
    "kv_control_host", "kv_control_port", "kv_data_port",
})  # fmt: skip
"""Settings that the stack sets for each worker, or has itself."""
_TITLES = {"Server": "Workers"}
_DOTTED = re.compile(r"--(?P<role>[a-z]+)\.(?P<rest>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Additional settings of a stack's processes."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every worker."""
    flags: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Further arguments, by role."""


def sections_for(roles: Iterable[str]) -> list[Section]:
    """Return the flags for every worker of these roles."""
    own = frozenset(each for section in worker_sections() for each in section.leave_out)
    sections = [
        Section(_TITLES.get(each.title, each.title), each.settings, own | FILLED)
        for each in worker_sections()
    ]
    return [*sections, Section("Prefill", PrefillConfig)] if "prefill" in roles else sections


def described(doc: str | None, roles: Sequence[str]) -> str:
    """Return the first line of a command's docstring, and a text about its flags for roles."""
    dotted = ", ".join(f"--{role}.FLAG" for role in roles)
    text = f"Flags below Workers apply to every worker, {dotted} to one role. "
    text += "Flags that only the router has need no prefix."
    return f"{(doc or '').splitlines()[0]} {text}"


def of_router(command: str, argv: Sequence[str], sections: Iterable[Section]) -> list[str]:
    """Return ``argv`` with the router's flags under its prefix. Raises UsageError."""
    own = {"--help", "--config"} | _flags_of(sections)
    try:
        return with_routers(argv, own, _flags_of(sections_of("router")), command)
    except RefusedFlag as error:
        raise UsageError(str(error), f"tandem {command}") from None


def _flags_of(sections: Iterable[Section]) -> set[str]:
    names = {flag_of(each.name) for section in sections for each in section.flags()}
    return names | {f"--no-{name[2:]}" for name in names}


def take_roles(argv: Sequence[str], roles: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return ``argv`` without flags of single roles, and these by role."""
    rest: list[str] = []
    taken: dict[str, list[str]] = {role: [] for role in roles}
    last: list[str] | None = None
    """List for the next value."""
    for word in argv:
        found = _DOTTED.fullmatch(word)
        if last is not None and not word.startswith("--"):
            last.append(word)
            last = None
        elif found is not None and found["role"] in taken:
            last, flag = taken[found["role"]], "--" + found["rest"]
            last.append(flag)
            if "=" in flag or flag in _switches(found["role"]):
                last = None
        else:
            rest.append(word)
            last = None
    return rest, taken


def environment_of(given: Mapping[type, Mapping[str, Any]], *own: type) -> dict[str, str]:
    """Return variables of the values, except the command's ``own`` classes."""
    return {
        ENV_PREFIX + name.upper(): _text(value)
        for settings, values in given.items()
        if settings not in own
        for name, value in values.items()
    }


def _switches(role: str) -> set[str]:
    given = (each for section in sections_of(role) for each in section.flags())
    names = {each.name for each in given if _is_switch(each.type)}
    return {flag_of(name) for name in names} | {"--no-" + flag_of(name)[2:] for name in names}


def _is_switch(hint: Any) -> bool:
    return plain_type(hint) is bool


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(value) if isinstance(value, tuple) else str(value)
