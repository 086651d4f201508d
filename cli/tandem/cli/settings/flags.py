"""Conversion of settings dataclasses to flags, environment variables and a config file.

Flags have precedence over the environment, that over the file, that over the default.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from tandem.base.settings import Setting, settings_of
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.names import ENV_PREFIX

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
_SIZE = re.compile(r"(?P<number>\d[\d_]{0,20}(\.\d{1,6})?)(?P<letter>[kmgtKMGT])(iB|i|B)?")


@dataclass(frozen=True, slots=True)
class Section:
    """Settings class, shown under a heading of its own in ``--help``."""

    title: str
    settings: type
    leave_out: frozenset[str] = frozenset()
    """Fields that the command sets itself."""

    def flags(self) -> list[Setting]:
        return [each for each in settings_of(self.settings) if each.name not in self.leave_out]


def add_flags(
    parser: argparse.ArgumentParser, sections: Sequence[Section], *, takes_file: bool = True
) -> None:
    """Add a flag per field, grouped by section, and ``--config`` if ``takes_file``."""
    if takes_file:
        parser.add_argument(
            "--config",
            metavar="FILE",
            help="YAML file of settings; a key is a flag's name with underscores",
        )
    for section in sections:
        group = parser.add_argument_group(section.title)
        for each in section.flags():
            _add_flag(group, each)


def read_settings(
    parsed: argparse.Namespace, sections: Sequence[Section], environ: Mapping[str, str]
) -> dict[type, dict[str, Any]]:
    """Return the given values per settings class, converted to the fields' types.

    Raises InvalidParameter that names the flag, variable or key.
    """
    from_file = _read_file(getattr(parsed, "config", None) or environ.get(ENV_PREFIX + "CONFIG"))
    result: dict[type, dict[str, Any]] = {}
    known = set()
    for section in sections:
        given = result.setdefault(section.settings, {})
        for each in section.flags():
            known.add(each.name)
            name, value = _lookup(each.name, parsed, environ, from_file)
            if value == "" and each.default != "":
                raise InvalidParameter(name, value, "a value; leave it out for the default")
            if value is not None:
                given[each.name] = convert(name, _chosen(value, each), each.type, each.choices)
    unknown = set(from_file) - known
    if unknown:
        name = sorted(unknown)[0]
        raise InvalidParameter(f"config file: {name}", from_file[name], "a key that --help lists")
    return result


def _chosen(value: Any, each: Setting) -> Any:
    return each.aliases.get(value, value) if isinstance(value, str) else value


def _lookup(
    name: str, parsed: argparse.Namespace, environ: Mapping[str, str], from_file: dict[str, Any]
) -> tuple[str, Any]:
    flag = getattr(parsed, name, None)
    if flag is not None:
        return flag_of(name), flag
    variable = ENV_PREFIX + name.upper()
    if variable in environ:
        return variable, environ[variable]
    return f"config file: {name}", from_file.get(name)


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8
        raise InvalidParameter("--config", path, f"a readable YAML file ({error})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidParameter("--config", path, "a YAML file that holds a mapping")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _add_flag(group: argparse._ArgumentGroup, each: Setting) -> None:
    notes = [each.unit] if each.unit else []
    if each.default not in (None, "", ()):
        notes.append(f"default: {each.default}")
    text = (each.help + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")
    kind = plain_type(each.type)
    if kind is bool:
        group.add_argument(
            flag_of(each.name), action=argparse.BooleanOptionalAction, default=None, help=text
        )
        return
    options: dict[str, Any] = {"default": None, "dest": each.name}
    if each.choices:
        options["metavar"] = "{" + ",".join(each.choices) + "}"
    else:
        options["metavar"] = {int: "N", float: "X"}.get(kind, "VALUE")
    if kind is tuple:
        options["action"] = "append"
    if each.name == "served_model_name" and kind is tuple:  # as other servers take it
        options |= {"action": "extend", "nargs": "+"}
    group.add_argument(flag_of(each.name), help=text, **options)


def flag_of(name: str) -> str:
    """Return ``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + name.replace("_", "-")


def plain_type(hint: Any) -> type:
    """Return ``int`` for ``int | None``, ``tuple`` for ``tuple[str, ...]``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return plain_type(members[0])
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return type(typing.get_args(hint)[0])
    return origin or hint  # type: ignore[no-any-return]


def convert(name: str, value: Any, hint: Any, allowed: tuple[str, ...] = ()) -> Any:
    """Return ``value`` as the field's type. Raises InvalidParameter."""
    kind = plain_type(hint)
    if kind is tuple:
        item, *_ = typing.get_args(hint)
        return tuple(convert(name, each, item) for each in _items(name, value))
    if kind is bool:
        return _boolean(name, value)
    if allowed and str(value) not in allowed:
        raise InvalidParameter(name, value, "one of " + ", ".join(allowed))
    if kind in (int, float):
        return _number(name, value, kind)
    if kind is Path:
        return Path(str(value))
    return kind(str(value))


def _items(name: str, value: Any) -> tuple[str, ...]:
    """Return a list's items. Raises InvalidParameter for an empty item."""
    given = value if isinstance(value, list | tuple) else _split(name, str(value))
    items = [str(item).strip() for item in given]
    if not items or not all(items):
        raise InvalidParameter(name, value, "one value or more, none empty; leave it out for none")
    return tuple(items)


def _split(name: str, text: str) -> list[Any]:
    """Return the items between commas, or of a JSON list."""
    if not text.startswith("["):
        return list(text.split(","))
    try:
        items = json.loads(text)
    except ValueError as error:
        allowed = f"values between commas, or a JSON list ({error})"
        raise InvalidParameter(name, "a list" if "key" in name.lower() else text, allowed) from None
    return items if isinstance(items, list) else [items]


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise InvalidParameter(name, value, "true or false")


def _number(name: str, value: Any, kind: type) -> Any:
    if isinstance(value, bool):
        raise InvalidParameter(name, value, "a number")
    try:
        return whole_number(str(value)) if kind is int else kind(value)
    except (TypeError, ValueError) as error:
        word = "an integer" if kind is int else "a number"
        raise InvalidParameter(name, value, word) from error


def whole_number(text: str) -> int:
    """Return the integer of ``4_096``, ``32k`` or ``1.5M``.

    Small letters are powers of 1,000, capitals of 1,024. Raises ValueError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        return int(text.replace("_", ""))
    letter = found["letter"]
    base = 1_000 if letter.islower() else 1_024
    exact = Decimal(found["number"].replace("_", "")) * base ** ("kmgt".index(letter.lower()) + 1)
    if exact != exact.to_integral_value():
        raise ValueError(f"{text} is not a whole number")
    return int(exact)


def environment() -> Mapping[str, str]:
    """Return the process environment."""
    return os.environ
