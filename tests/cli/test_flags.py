"""Flags, environment and file: one set of settings, three ways to give them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tandem.base.settings import setting
from tandem.cli.settings.flags import Section, add_flags, read_settings
from tandem.protocol.errors import InvalidParameter


@dataclass(frozen=True, kw_only=True)
class Kettle:
    """Settings of every type that a room uses."""

    max_cups: int = setting(4, "Cups, at most.", unit="cups")
    heat: float | None = setting(None, "Degrees; none boils, 100 % of the time.")
    whistle: bool = setting(True, "Make a noise.")
    colour: str = setting("red", "Paint.", choices=("red", "blue"))
    friends: tuple[str, ...] = setting((), "Who drinks; may be repeated.")
    inner: int = field(default=3)


SECTIONS = [Section("Kettle", Kettle)]


def read(argv: list[str], environ: dict[str, str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, SECTIONS)
    return read_settings(parser.parse_args(argv), SECTIONS, environ or {})[Kettle]


def test_only_what_was_given_is_returned() -> None:
    assert read([]) == {}


def test_flags_take_the_fields_types() -> None:
    """Numbers, switches, choices and lists come out as such."""
    given = read(
        [
            "--max-cups",
            "2",
            "--heat=91.5",
            "--no-whistle",
            "--colour",
            "blue",
            "--friends",
            "Ann",
            "--friends",
            "Bo",
        ]
    )

    assert given == {
        "max_cups": 2,
        "heat": 91.5,
        "whistle": False,
        "colour": "blue",
        "friends": ("Ann", "Bo"),
    }


def test_a_flag_beats_the_environment_and_that_the_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-cups: 1\nheat: 1\ncolour: blue\nfriends: [Cy]\n")
    environ = {"TANDEM_MAX_CUPS": "2", "TANDEM_HEAT": "2", "TANDEM_CONFIG": str(path)}

    given = read(["--max-cups", "3"], environ)

    assert given == {"max_cups": 3, "heat": 2.0, "colour": "blue", "friends": ("Cy",)}


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--max-cups", "many"], {}, "--max-cups: 'many' is not allowed; an integer"),
        ([], {"TANDEM_WHISTLE": "loud"}, "TANDEM_WHISTLE: 'loud' is not allowed; true or false"),
        (["--colour", "green"], {}, "one of red, blue"),
        (["--config", "/nonexistent.yaml"], {}, "--config"),
    ],
)
def test_a_wrong_value_names_where_it_came_from(
    argv: list[str], environ: dict[str, str], message: str
) -> None:
    """The error says flag or variable, the value and what is allowed."""
    with pytest.raises(InvalidParameter, match=message):
        read(argv, environ)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes("colour: röt\n".encode("latin-1"))
    with pytest.raises(InvalidParameter, match=r"--config: .* a readable YAML file"):
        read(["--config", str(path)])


def test_an_unknown_key_of_the_file_is_an_error(tmp_path: Path) -> None:
    """A misspelt setting is not silently ignored."""
    path = tmp_path / "settings.yaml"
    path.write_text("max_cubs: 1\n")

    with pytest.raises(InvalidParameter, match="max_cubs"):
        read(["--config", str(path)])


def test_help_shows_units_defaults_and_percent_signs() -> None:
    """The help text of a field is what the user reads."""
    parser = argparse.ArgumentParser()
    add_flags(parser, SECTIONS)
    text = " ".join(parser.format_help().split())

    assert "--max-cups N Cups, at most. (cups; default: 4)" in text
    assert "100 % of the time" in text
    assert "--inner" not in text
