"""Flags of habit on Tandem's command lines: those of other servers, and the router's on a stack.

Rewrites words before they are parsed, by the tables of ``protocol/other_servers``. Called by
``command`` for every command, and by those that run a stack.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence

from tandem.llm.other_servers import NEEDLESS, REFUSED, SAME, SWITCHES

_BOOLEANS = {"true", "false", "1", "0"}
_SHORT = re.compile(r"-(?P<name>tp|pp|dp|q|O)(?P<rest>=?.*)")
_printed: set[str] = set()
"""Lines that were printed: a stack reads the flags of its processes more than once."""


class RefusedFlag(Exception):
    """A flag that asks for what cannot be done; the text names both."""


def translated(words: Sequence[str], known: Collection[str], command: str) -> list[str]:
    """Return ``words`` with flags of other servers in our names, or left out with a line.

    ``known`` are the command's own flags. Raises RefusedFlag.
    """
    result: list[str] = []
    rest = iter(_long(words, known))
    pending: str | None = None
    while (word := pending if pending is not None else next(rest, None)) is not None:
        pending = None
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        given = flag if len(name) > 1 else flag[1:]
        if not flag.startswith("--") or flag in known:
            result.append(word)
        elif name in SAME and (ours := f"--{SAME[name].replace('_', '-')}") in known:
            result.append(ours + has_value + value)
        elif positive in NEEDLESS:
            _print(f"tandem {command}: {given} has no effect: {NEEDLESS[positive]}")
            if not has_value:
                pending = _after_value(rest, is_switch=positive in SWITCHES or name != positive)
        elif name in REFUSED:
            raise RefusedFlag(f"{given} cannot be done: {REFUSED[name]}")
        else:
            result.append(word)
    return result


def with_routers(
    words: Sequence[str], own: Collection[str], of_router: Collection[str], command: str
) -> list[str]:
    """Return ``words`` with flags that only the router has under its prefix."""
    return [
        f"--router.{word[2:]}" if flag in of_router and flag not in own else word
        for word in translated(words, {*own, *of_router}, command)
        for flag in (word.partition("=")[0],)
    ]


def _long(words: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield the words, with short flags of other servers in their long form."""
    for word in words:
        found = _SHORT.fullmatch(word)
        if found is None or word in known:
            yield word
            continue
        yield f"--{found['name']}"
        if rest := found["rest"].removeprefix("="):
            yield rest


def _after_value(rest: Iterator[str], *, is_switch: bool) -> str | None:
    """Step over a flag's value; return the next word if it has none."""
    word = next(rest, None)
    if word is None or word.startswith("--"):
        return word
    return word if is_switch and word.lower() not in _BOOLEANS else None


def _print(line: str) -> None:
    if line not in _printed:
        _printed.add(line)
        print(line, file=sys.stderr, flush=True)
