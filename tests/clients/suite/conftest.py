"""Keeps which test has shown what of which client, for the table of docs/reference/clients.md."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

SHOWN = pytest.StashKey[list[list[str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHOWN] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that passes has shown what it covers."""
    report = yield
    if report.when == "call" and report.passed:
        test = f"{item.path.name}::{item.name.partition('[')[0]}"
        for mark in item.iter_markers("covers"):
            client, *features = mark.args
            item.config.stash[SHOWN] += [[client, feature, test] for feature in features]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path: Any = os.environ.get("TANDEM_CLIENTS_SHOWN")
    if path:
        shown = sorted({tuple(each) for each in session.config.stash[SHOWN]})
        Path(path).write_text(json.dumps(shown))
