"""Removal of keys from command lines, which every user of the machine can read.

A command with a key starts itself again with the key in its environment.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from tandem.protocol.names import ENV_PREFIX

SECRETS = ("api_key", "admin_api_key", "kv_secret")
"""Settings whose values are keys."""
SEVERAL = ("api_key", "admin_api_key")
ENV_API_KEY = ENV_PREFIX + "API_KEY"
SERVERS = ("serve", "up", "router", "prefill", "decode")
_PREFIXES = ("--router.", "--")


def take_secrets(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return ``words`` without keys, and an environment with these keys."""
    rest: list[str] = []
    found: dict[str, list[str]] = {}
    given = iter(words)
    for word in given:
        flag, has_value, value = word.partition("=")
        name = _secret(flag)
        if name is None:
            rest.append(word)
            continue
        following = value if has_value else next(given, None)
        if not following:  # the parser reports it
            rest.append(word if following is None else f"{flag}=")
            continue
        found.setdefault(name, []).append(following)
    environment = {
        ENV_PREFIX + name.upper(): json.dumps(values) if name in SEVERAL else values[-1]
        for name, values in found.items()
    }
    return rest, environment


def hide_secrets(argv: Sequence[str]) -> None:
    """Start this process again if its command line has keys."""
    if not argv or argv[0] not in SERVERS:
        return
    rest, environment = take_secrets(argv[1:])
    if environment:
        command = [sys.executable, "-m", "tandem.cli", argv[0], *rest]
        os.execve(sys.executable, command, {**os.environ, **environment})


def api_key_of(given: str | None) -> str | None:
    """Return the key of a router's client: ``given``, else the environment's first."""
    if given is not None:
        return given
    value = os.environ.get(ENV_API_KEY) or None
    if value is not None and value.startswith("["):
        try:
            keys = json.loads(value)
        except ValueError:
            return value
        return str(keys[0]) if isinstance(keys, list) and keys else None
    return None if value is None else value.split(",")[0].strip()


def _secret(flag: str) -> str | None:
    for prefix in _PREFIXES:
        name = flag.removeprefix(prefix).replace("-", "_")
        if flag.startswith(prefix) and name in SECRETS:
            return name
    return None
