"""Pages that users read are held to the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e_cluster.manual import NOT_RUN, RUN, sections
from tests.e2e_cluster.test_documents import ORDER

from tandem.operator.api.status import ADVICE, ConditionType, Reason
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


def test_every_command_of_the_manual_is_run_or_marked():
    """A block of docs/install.md or operations.md is run by the cluster's suite, or is marked."""
    blocks = sections()
    assert {kind for each in blocks.values() for kind, _ in each} == {RUN, NOT_RUN}
    run = {title for title, each in blocks.items() if RUN in {kind for kind, _ in each}}
    assert run == set(ORDER)
