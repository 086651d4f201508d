"""`make e2e` builds images of the release before only for the test that needs them."""

from __future__ import annotations

import pytest
from tests.e2e_cluster.__main__ import upgrades

UPGRADE = "tests/e2e_cluster/test_upgrade.py"


@pytest.mark.parametrize(
    "arguments",
    [[UPGRADE], [f"{UPGRADE}::test_x", "-x"]],
)
def test_runs_that_upgrade_need_older_images(arguments: list[str]):
    """The test itself, or one of its functions."""
    assert upgrades(arguments)


@pytest.mark.parametrize(
    "arguments",
    [[], ["-x"], ["tests/e2e_cluster/"], ["tests"], ["tests/e2e_cluster/test_repair.py", "-x"]],
)
def test_other_runs_need_none(arguments: list[str]):
    """Their images take minutes to build."""
    assert not upgrades(arguments)
