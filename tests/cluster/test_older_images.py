"""`make e2e` builds images of the release before only for the test that needs them."""

from __future__ import annotations

import pytest
from tests.e2e_cluster.__main__ import upgrades

UPGRADE = "tests/e2e_cluster/test_upgrade.py"


@pytest.mark.parametrize(
    "arguments",
    [[], ["-x"], [UPGRADE], [f"{UPGRADE}::test_x", "-x"], ["tests/e2e_cluster/"], ["tests"]],
)
def test_runs_that_upgrade_need_older_images(arguments: list[str]):
    """All of the suite, its folder, and the test itself."""
    assert upgrades(arguments)


@pytest.mark.parametrize(
    "arguments", [["tests/e2e_cluster/test_repair.py", "-x"], ["tests/e2e_cluster/test_up"]]
)
def test_other_runs_need_none(arguments: list[str]):
    """Their images take minutes to build."""
    assert not upgrades(arguments)
