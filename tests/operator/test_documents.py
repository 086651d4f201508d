"""Pages that users read are held to the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.operator.api.conditions import ADVICE, ConditionType, Reason
from tandem.protocol import names

DOCS = Path(__file__).parents[2] / "docs"
RESOURCE = (DOCS / "resource.md").read_text()
CONTRACT = (DOCS / "kubernetes.md").read_text()


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_documented(reason: Reason):
    """A reason in a condition can be looked up, with what to do."""
    assert f"| `{reason}` | {ADVICE[reason]} |" in RESOURCE


@pytest.mark.parametrize("kind", ConditionType)
def test_every_condition_is_documented(kind: ConditionType):
    """A condition can be looked up."""
    assert f"`{kind}`" in RESOURCE


@pytest.mark.parametrize(
    "name",
    [
        value
        for key, value in vars(names).items()
        if key.startswith(("ENV_", "HEADER_", "ANNOTATION_")) and key not in ("ENV_PREFIX",)
    ],
)
def test_every_name_that_pods_share_is_documented(name: str):
    """The contract between images names each variable, header and annotation."""
    assert name in CONTRACT
