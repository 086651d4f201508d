"""The sizes of `make house`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts import house


def test_modules_that_import_each_other_are_in_a_circle() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert house.in_circles(graph) == {"a", "b", "c"}


def test_a_package_is_not_imported_for_its_submodules() -> None:
    code = "from p import q, Name\nimport p.r\ndef f():\n    from p.s import thing\n"
    known = {"p", "p.q", "p.r", "p.s"}
    assert sorted(house.imported(ast.parse(code), known)) == ["p", "p.q", "p.r", "p.s"]
    assert list(house.imported(ast.parse("from p import q"), known)) == ["p.q"]


@pytest.mark.parametrize(
    ("text", "is_banned"), [("Of a step.", True), ("Return it.", False), ("Offer it.", False)]
)
def test_a_docstring_is_banned_by_its_first_word(text: str, is_banned: bool) -> None:
    (node,) = ast.parse(f'def f():\n    """{text}"""').body
    assert house.is_banned(node) is is_banned


def test_a_figure_above_its_limit_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = tmp_path / "house.toml"
    monkeypatch.setattr(house, "LIMITS", limits)
    monkeypatch.setattr(house, "figures", lambda: {"classes": 5, "flags": 3})

    limits.write_text("[at_most]\nclasses = 5\nflags = 3\n")
    assert house.main() == 0
    limits.write_text("[at_most]\nclasses = 4\nflags = 3\n")
    assert house.main() == 1
    assert "above its limit" in capsys.readouterr().out
