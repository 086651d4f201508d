"""First steps of every command: parse, merge, set up logging."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import sys
from collections.abc import (
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from typing import Any, NoReturn

from tandem.cli.settings.flags import (
    Section,
    add_flags,
    environment,
    read_settings,
)
from tandem.llm.other_servers import (
    NEEDLESS,
    REFUSED,
    SAME,
    SWITCHES,
)
from tandem.protocol.errors import InvalidParameter, TandemError

_BOOLEANS = {"true", "false", "1", "0"}
_SHORT = re.compile(r"-(?P<name>tp|pp|dp|q|O)(?P<rest>=?.*)")
_printed: set[str] = set()
"""Printed lines: a stack reads flags more than once."""


class RefusedFlag(Exception):
    """The flag requests something impossible."""


def translated(words: Sequence[str], known: Collection[str], command: str) -> list[str]:
    """Return ``words`` with flags of other servers in our names, or omitted with a line.

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
    """Return ``words`` with the router's flags under its prefix."""
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
    """Skip the value of a flag. Return the next word instead if the flag has no value."""
    word = next(rest, None)
    if word is None or word.startswith("--"):
        return word
    return word if is_switch and word.lower() not in _BOOLEANS else None


def _print(line: str) -> None:
    if line not in _printed:
        _printed.add(line)
        print(line, file=sys.stderr, flush=True)


def check_place(param: str, path: str | None) -> None:
    """Raise InvalidParameter for a file that could not be written."""
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise InvalidParameter(param, path, "a file in a folder that is there")


_ARGUMENT = re.compile(r"argument (?P<flag>\S+): (?P<what>.*)", re.DOTALL)
_WRONG_TYPE = re.compile(r"invalid (?P<kind>int|float) value: (?P<value>.*)", re.DOTALL)
NAMES = "served_model_name"


class UsageError(TandemError):
    """The command line is invalid; the text names the word and what is allowed."""

    exit_status = 2

    def __init__(self, text: str, command: str) -> None:
        super().__init__(f"{text}; see `{command} --help`")


class Parser(argparse.ArgumentParser):
    """Parser with errors of one line and without abbreviated flags.

    Abbreviations would change with later releases, and hide misspelt flags.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    @property
    def flags(self) -> frozenset[str]:
        """Return every flag with its dashes."""
        return frozenset(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        found = _ARGUMENT.fullmatch(message)
        if found is None:
            raise UsageError(message, self.prog)
        flag, what = found["flag"], found["what"]
        if what.startswith("expected one argument"):
            what = "a value has to follow"
        elif what.startswith("ignored explicit argument"):
            what = "takes no value; give one of the two alone"
        elif wrong := _WRONG_TYPE.fullmatch(what):
            word = "an integer" if wrong["kind"] == "int" else "a number"
            what = f"{wrong['value']} is not allowed; {word}"
        raise UsageError(f"{flag}: {what}", self.prog)

    def read(self, argv: Sequence[str], *, takes_model: bool = False) -> argparse.Namespace:
        """Parse all of ``argv``. A word without a flag is the model, if the command has one.

        Raises UsageError for the first unknown word.
        """
        parsed, unknown = self.parse_known_args(argv)
        for word in unknown:  # argparse takes an optional word only before the first flag
            if word.startswith("-") or not takes_model or parsed.model is not None:
                model = parsed.model if takes_model else None
                raise UsageError(self._unknown(word, model), self.prog)
            parsed.model = word
        return parsed

    def _unknown(self, word: str, model: str | None) -> str:
        if not word.startswith("-"):
            why = "only flags are" if model is None else f"the model is {model!r}"
            return f"{word!r} is not allowed here; {why}"
        flag = word.partition("=")[0]
        near = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75)
        return f"{flag} is not a flag of `{self.prog}`" + (f"; {near[0]} is" if near else "")


def parse(
    command: str, description: str, sections: Sequence[Section], argv: list[str]
) -> dict[type, dict[str, Any]]:
    """Return the given values per settings class. Exits after --help.

    Raises UsageError or InvalidParameter.
    """
    return read_command_line(command, description, sections, argv, environment())


def read_command_line(
    command: str,
    description: str,
    sections: Sequence[Section],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    takes_file: bool = True,
) -> dict[type, dict[str, Any]]:
    """Parse with an environment, and with ``--config`` if ``takes_file``."""
    takes_model = any(each.name == "model" for section in sections for each in section.flags())
    parser = Parser(
        prog=f"tandem {command}",
        usage=f"tandem {command} {'[MODEL] ' if takes_model else ''}[options]",
        description=description,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=100),
    )
    add_flags(parser, sections, takes_file=takes_file)
    try:
        argv = translated(argv, parser.flags, command)
    except RefusedFlag as error:
        raise UsageError(str(error), f"tandem {command}") from None
    parsed = parser.read(argv, takes_model=takes_model)
    if takes_model and parsed.model is None and len(getattr(parsed, NAMES, None) or ()) > 1:
        names = " ".join(getattr(parsed, NAMES))
        text = f"--served-model-name: {names!r} may hold the model; give it first, or by --model"
        raise UsageError(text, f"tandem {command}")
    return read_settings(parsed, sections, environ)


def words(setting: str, value: str) -> list[str]:
    """Return a string of flags, split as by a shell. Raises InvalidParameter."""
    try:
        return shlex.split(value)
    except ValueError as error:
        raise InvalidParameter(setting, value, f"flags as a shell takes them ({error})") from error
