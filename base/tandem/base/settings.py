"""Descriptions of settings, from which flags, environment variables and files are derived.

The config classes check their values in ``__post_init__``, with the helpers below.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

from tandem.protocol.errors import InvalidParameter

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a config class, as a command line shows it."""

    name: str
    """Field name; the flag has dashes, the variable capitals."""
    type: Any
    """Annotated type; ``X | None`` if None has a meaning."""
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    unit: str = ""
    group: str = ""
    required: bool = False


def setting(
    default: _Value,
    help: str,  # noqa: A002
    *,
    choices: tuple[str, ...] = (),
    aliases: Mapping[str, str] = MappingProxyType({}),
    unit: str = "",
) -> _Value:
    """Return a dataclass field with its default, help text, choices and unit."""
    metadata = {"help": help, "choices": choices, "aliases": aliases, "unit": unit}
    value: _Value = field(default=default, metadata=metadata)
    return value


def required(help: str) -> Any:  # noqa: A002  as above
    """Return a dataclass field that must be given."""
    return field(metadata={"help": help, "choices": (), "unit": ""})


@cache
def settings_of(config: type) -> tuple[Setting, ...]:
    """Return the settings of one config class, in field order."""
    hints = get_type_hints(config)
    return tuple(
        Setting(
            name=each.name,
            type=hints[each.name],
            default=None if each.default is MISSING else each.default,
            help=each.metadata["help"],
            choices=each.metadata["choices"],
            aliases=each.metadata.get("aliases", {}),
            unit=each.metadata["unit"],
            group=config.__name__,
            required=each.default is MISSING,
        )
        for each in fields(config)
        if "help" in each.metadata
    )


def values_of_file(param: str, path: str, config: type) -> dict[str, Any]:
    """Return the values of a YAML file by field name of ``config``. Raise InvalidParameter."""
    try:
        text = Path(path).read_text()
    except (OSError, ValueError) as error:  # ValueError: it is not UTF-8
        raise InvalidParameter(param, path, f"a readable YAML file ({error})") from error
    return values_of_yaml(param, text, config, source=path)


def values_of_yaml(
    param: str, text: str, config: type, *, source: str | None = None
) -> dict[str, Any]:
    """Return the values of a YAML text by field name of ``config``. Raise InvalidParameter."""
    import yaml

    given, kind = (text, "YAML text") if source is None else (source, "YAML file")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidParameter(param, given, f"a readable {kind} ({error})") from error
    if not isinstance(content, dict):
        raise InvalidParameter(param, given, f"a {kind} with a mapping of names to values")
    known = [each.name for each in fields(config)]
    for name in content:
        if name not in known:
            raise InvalidParameter(param, str(name), f"these names: {', '.join(known)}")
    return content


def check_integer(param: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InvalidParameter unless ``value`` is an integer from ``low`` to ``high``."""
    allowed = f"an integer of at least {low}" if high is None else f"an integer, {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParameter(param, value, allowed)
    if value < low or (high is not None and value > high):
        raise InvalidParameter(param, value, allowed)


def check_optional_integer(param: str, value: object, low: int, high: int | None = None) -> None:
    """Raise InvalidParameter unless ``value`` is None or passes ``check_integer``."""
    if value is not None:
        check_integer(param, value, low, high)


def check_positive(
    param: str, value: object, high: float = math.inf, *, or_zero: bool = False
) -> None:
    """Raise InvalidParameter unless ``value`` is a finite number above 0 and at most ``high``."""
    low = "of at least 0" if or_zero else "above 0"
    allowed = f"a number {low}" + ("" if high == math.inf else f" and at most {high:g}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(param, value, allowed)
    if value > high or value < 0 or (value == 0 and not or_zero):
        raise InvalidParameter(param, value, allowed)


def check_share(param: str, value: object, *, above_zero: bool = False) -> None:
    """Raise InvalidParameter unless ``value`` is a number in [0, 1], or in (0, 1]."""
    allowed = "a number above 0 and at most 1" if above_zero else "a number from 0 to 1"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameter(param, value, allowed)
    if value > 1 or value < 0 or (above_zero and value == 0):
        raise InvalidParameter(param, value, allowed)


def check_flag(param: str, value: object) -> None:
    """Raise InvalidParameter unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise InvalidParameter(param, value, "true or false")


def check_choices(config: Any) -> None:
    """Check every value that has choices, and replace aliases by their choice. Raises
    InvalidParameter.
    """
    for each in settings_of(config.__class__):
        value = getattr(config, each.name)
        if isinstance(value, str) and value in each.aliases:
            value = each.aliases[value]
            object.__setattr__(config, each.name, value)
        if each.choices and value not in each.choices:
            raise InvalidParameter(each.name, value, f"one of {', '.join(each.choices)}")
