"""docs/reference/clients.md claims nothing that no test of the suite of clients shows."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from scripts.reference.clients import FEATURES, FOLDER, SHOWN, pins

Row = tuple[str, str, str]
"""Client, feature, test."""


def marked(path: Path) -> Iterator[Row]:
    tree = ast.parse(path.read_text())
    client = ""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, call = node.targets[0], node.value
            if isinstance(target, ast.Name) and target.id == "covers":
                client = ast.literal_eval(call.args[1])
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "COVERED":
            assert node.value is not None
            for name, features in ast.literal_eval(node.value).items():
                yield from ((name, each, f"{path.name}::test_a_program") for each in features)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "covers":
                    features = [ast.literal_eval(each) for each in mark.args]
                    yield from ((client, each, f"{path.name}::{node.name}") for each in features)


def test_the_page_has_what_the_suite_shows() -> None:
    """No less, no more: `make clients` has run through since a test came, went or changed."""
    files = sorted((FOLDER / "suite").glob("test_*.py"))
    wanted = {row for path in files for row in marked(path)}
    kept = json.loads(SHOWN.read_text())
    shown = {
        (client, feature, test)
        for client, what in kept.items()
        for feature, tests in what["shown"].items()
        for test in tests
    }

    assert wanted == shown
    assert {feature for _, feature, _ in wanted} == set(FEATURES)


def test_versions_are_those_that_were_tried() -> None:
    kept = json.loads(SHOWN.read_text())

    assert {name: pins()[name] for name in kept} == {
        name: what["version"] for name, what in kept.items()
    }


def test_the_lock_names_no_private_index() -> None:
    """Clients come from where everybody gets them."""
    hosts = {part.split("/")[0] for part in (FOLDER / "uv.lock").read_text().split("https://")[1:]}

    assert hosts <= {"pypi.org", "files.pythonhosted.org"}
