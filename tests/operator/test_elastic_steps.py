"""Workers beside routers that place elastically get the bound of steps that it counts on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_children import facts

from tandem.operator.desired.naming import Role
from tandem.operator.desired.worker import worker_arguments

ELASTIC = ["--placement", "elastic"]


def bound_of(role: Role, **changes: Any) -> str | None:
    """``--max-itl-ms`` of a worker of that role; None for none. The last of several holds."""
    words = [
        word for each in worker_arguments(facts(**changes), role) for word in each.split("=", 1)
    ]
    at = [number for number, word in enumerate(words) if word == "--max-itl-ms"]
    return words[at[-1] + 1] if at else None


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_both_roles_of_an_elastic_pair_are_bounded(role: Role):
    """As by ``tandem up``: by 0.84 of the router's target between tokens."""
    assert bound_of(role) is None
    assert bound_of(role, router__extraArgs=["--placement", "strict"]) is None
    assert bound_of(role, router__extraArgs=ELASTIC) == "21"
    assert bound_of(role, router__extraArgs=["--placement=elastic"]) == "21"
    assert bound_of(role, router__extraArgs=[*ELASTIC, "--target-itl-ms=50"]) == "42"
    assert bound_of(role, router__extraArgs=[*ELASTIC, "--placement=conditional"]) is None


def test_what_a_role_was_given_stands():
    """By a flag of the role or of both, or by a variable of its podTemplate."""
    given = {"router__extraArgs": ELASTIC}
    assert bound_of(Role.DECODE, decode__extraArgs=["--max-itl-ms=30"], **given) == "30"
    assert bound_of(Role.PREFILL, decode__extraArgs=["--max-itl-ms", "30"], **given) == "21"
    wide = {"engine__extraArgs": ["--max-num-mixed-tokens", "512"], **given}
    assert bound_of(Role.PREFILL, **wide) is bound_of(Role.DECODE, **wide) is None
    variable = {"name": "TANDEM_MAX_ITL_MS", "value": "30"}
    template = {"spec": {"containers": [{"name": "main", "env": [variable]}]}}
    assert bound_of(Role.DECODE, decode__podTemplate=template, **given) is None
    assert bound_of(Role.PREFILL, decode__podTemplate=template, **given) == "21"


@pytest.mark.parametrize(
    "changes",
    [
        {"disaggregation__mode": "Never"},
        {"task": "Embed"},
        {"router__extraArgs": [*ELASTIC, "--target-itl-ms", "soon"]},
        {"router__extraArgs": [*ELASTIC, "--target-itl-ms=0"]},
        {"router__extraArgs": [*ELASTIC, "--target-itl-ms=nan"]},
    ],
)
def test_without_a_pair_or_a_target_nothing_is_bounded(changes: dict[str, Any]):
    """Where prompts have one way alone, and where the router refuses what it is told."""
    changes = {"router__extraArgs": ELASTIC, **changes}
    assert bound_of(Role.DECODE, **changes) is None


@pytest.mark.parametrize("template", [{"spec": 3}, {"spec": {"containers": "main"}}, {}])
def test_a_template_that_is_none_has_no_variables(template: dict[str, Any]):
    """It is refused elsewhere, by name."""
    given = {"router__extraArgs": ELASTIC, "decode__podTemplate": template}
    assert bound_of(Role.DECODE, **given) == "21"
