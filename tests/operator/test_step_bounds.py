"""GPU workers of a pair get the bound of steps that placement relies on."""

from __future__ import annotations

from typing import Any

import pytest
from tests.operator.test_children import facts

from tandem.operator.desired.naming import Role
from tandem.operator.desired.worker import worker_arguments

GPU = {"limits": {"nvidia.com/gpu": 1}}


def bound_of(role: Role, **changes: Any) -> str | None:
    """Return ``--max-itl-ms`` of a worker of that role, on GPUs unless given; the last holds."""
    changes = {"prefill__resources": GPU, "decode__resources": GPU, **changes}
    words = [
        word for each in worker_arguments(facts(**changes), role) for word in each.split("=", 1)
    ]
    at = [number for number, word in enumerate(words) if word == "--max-itl-ms"]
    return words[at[-1] + 1] if at else None


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_both_roles_of_a_pair_are_bounded(role: Role):
    """By 0.84 of the router's target between tokens, as ``tandem up`` does."""
    assert bound_of(role) == "21"
    assert bound_of(role, router__extraArgs=["--strict-handoff"]) is None
    both = ["--strict-handoff", "--no-strict-handoff"]
    assert bound_of(role, router__extraArgs=both) == "21"
    assert bound_of(role, router__extraArgs=both[::-1]) is None
    assert bound_of(role, router__extraArgs=["--target-itl-ms=50"]) == "42"


@pytest.mark.parametrize(
    ("resources", "bound"),
    [
        ({}, None),
        ({"limits": {"cpu": "4"}}, None),
        ({"requests": {"amd.com/gpu": 1}}, "21"),
        ({"claims": [{"name": "gpu"}]}, "21"),
    ],
)
def test_only_workers_that_request_gpus_are_bounded(resources: dict[str, Any], bound: str | None):
    """The target is below a step of a CPU, where a bound would leave prompts the least chunk."""
    assert bound_of(Role.DECODE, decode__resources=resources) == bound


def test_a_bound_that_a_role_was_given_stands():
    """By a flag of the role or of both, or by a variable of its podTemplate."""
    assert bound_of(Role.DECODE, decode__extraArgs=["--max-itl-ms=30"]) == "30"
    assert bound_of(Role.PREFILL, decode__extraArgs=["--max-itl-ms", "30"]) == "21"
    both = {"engine__extraArgs": ["--max-itl-ms", "40"]}
    assert bound_of(Role.PREFILL, **both) == bound_of(Role.DECODE, **both) == "40"
    variable = {"name": "TANDEM_MAX_ITL_MS", "value": "30"}
    template = {"spec": {"containers": [{"name": "main", "env": [variable]}]}}
    assert bound_of(Role.DECODE, decode__podTemplate=template) is None
    assert bound_of(Role.PREFILL, decode__podTemplate=template) == "21"


@pytest.mark.parametrize(
    "changes",
    [
        {"disaggregation__mode": "Never"},
        {"disaggregation__mode": "Always"},
        {"task": "Embed"},
        {"router__extraArgs": ["--target-itl-ms", "soon"]},
        {"router__extraArgs": ["--target-itl-ms=0"]},
        {"router__extraArgs": ["--target-itl-ms=nan"]},
    ],
)
def test_without_a_choice_or_a_target_nothing_is_bounded(changes: dict[str, Any]):
    """If prompts have one way alone, or if the router refuses its target."""
    assert bound_of(Role.DECODE, **changes) is None


@pytest.mark.parametrize("template", [{"spec": 3}, {"spec": {"containers": "main"}}, {}])
def test_a_malformed_template_has_no_variables(template: dict[str, Any]):
    """It is refused elsewhere, by name."""
    assert bound_of(Role.DECODE, decode__podTemplate=template) == "21"
