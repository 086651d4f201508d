"""A limits file changes limits by name; a wrong file or limit is refused before anything starts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from tandem.cli.serve.child_flags import ChildFlagsError, check_router
from tandem.cli.serve.router import prepared_config
from tandem.hub.folder import ModelFiles
from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig
from tandem.router.limits import Limits, with_limits

DOCS = Path(__file__).parents[3] / "docs"


def test_the_limits_of_a_file_replace_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("max_body_bytes: 1000\nheader_timeout: 2.5\n")

    config = prepared_config({RouterConfig: {"limits_file": str(path)}, ModelFiles: {}})
    stack = check_router(["--limits-file", str(path)], {})

    for each in (config, stack):
        assert (each.max_body_bytes, each.header_timeout) == (1000, 2.5)
        assert each.max_prompts == Limits().max_prompts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_body_byte: 1", "max_body_byte"),
        ("- 1", "a YAML file with a mapping of names to values"),
        ("", "a YAML file with a mapping of names to values"),
        ("a: [", "a readable YAML file"),
        ("max_body_bytes: 0", "max_body_bytes: 0 is not allowed; an integer of at least 1"),
        ("max_body_bytes: many", "max_body_bytes"),
        ("header_timeout: .inf", "header_timeout"),
        ("port: 80", "port"),
    ],
)
def test_a_wrong_limits_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(text)

    with pytest.raises(InvalidParameter) as error:
        RouterConfig(**with_limits({"limits_file": str(path)}, {}))
    assert said in str(error.value)
    with pytest.raises(ChildFlagsError):
        check_router(["--limits-file", str(path)], {})


def test_a_limits_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="a readable YAML file"):
        with_limits({"limits_file": str(tmp_path / "none.yaml")}, {})


def test_every_limit_is_documented() -> None:
    page = (DOCS / "reference" / "limits.md").read_text()
    assert [each.name for each in fields(Limits) if f"| `{each.name}` |" not in page] == []


def test_limits_of_the_environment_count_and_the_file_has_precedence(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("max_attempts: 2")
    environ = {"TANDEM_LIMITS": '{"max_queue_age": 7, "max_attempts": 1}'}

    assert with_limits({}, environ) == {"max_queue_age": 7, "max_attempts": 1}
    found = with_limits({"limits_file": str(path)}, environ)
    assert (found["max_queue_age"], found["max_attempts"]) == (7, 2)
    assert check_router([], environ).max_queue_age == 7
    with pytest.raises(InvalidParameter, match=r"TANDEM_LIMITS.*max_queue_ages"):
        with_limits({}, {"TANDEM_LIMITS": "{max_queue_ages: 7}"})
    with pytest.raises(InvalidParameter, match=r"TANDEM_LIMITS.*a YAML text with a mapping"):
        with_limits({}, {"TANDEM_LIMITS": "7"})
