"""A timings file changes intervals and limits of the operator by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.operator.settings import OperatorSettings, Timings, with_timings
from tandem.protocol.errors import InvalidParameter

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "limits.md"


def settings_with(path: Path) -> OperatorSettings:
    """Return the settings of ``tandem operator`` with that file."""
    sections, words = [Section("Operator", OperatorSettings)], ["--timings-file", str(path)]
    given = parse("operator", "", sections, words)
    return OperatorSettings(**with_timings(given[OperatorSettings]))


def test_the_timings_of_a_file_replace_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text("resync_seconds: 3\nrouter_silence_seconds: 0\nmodel_jobs: 2\n")
    settings = settings_with(path)
    assert (settings.resync_seconds, settings.router_silence_seconds) == (3, 0)
    assert (settings.model_jobs, settings.canary_seconds) == (2, Timings().canary_seconds)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("resync: 1", "resync"),
        ("- 1", "a YAML file with a mapping of names to values"),
        ("a: [", "a readable YAML file"),
        ("resync_seconds: 0", "resync_seconds: 0 is not allowed"),
        ("workers: 65", "workers: 65 is not allowed"),
        ("model_jobs: many", "model_jobs"),
        ("renew_deadline: 20", "renew_deadline: 20 is not allowed"),
    ],
)
def test_a_wrong_timings_file_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(text)
    with pytest.raises(InvalidParameter) as error:
        settings_with(path)
    assert named in str(error.value)


def test_every_timing_is_documented() -> None:
    assert all(f"| `{each.name}` |" in PAGE.read_text() for each in fields(Timings))
