"""Looks at one service in order, on a cluster in memory: what one leaves to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.operator.in_memory import KEY, Demo
from tests.waiting import wait_for


@pytest.fixture
def demo() -> Iterator[Callable[..., Demo]]:
    """Makes services that serve; their operators end with the test."""
    made: list[Demo] = []

    def make(**changes: Any) -> Demo:
        made.append(Demo(**changes))
        made[-1].turn(5)
        assert made[-1].condition("Ready")[0] == "True"
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_repair_makes_no_job_that_was_not_accepted(demo: Callable[..., Demo]):
    """Who deletes the Job, as messages advise, gets none that reads a Secret without leave."""
    served = demo()
    served.cluster.put("Secret", {"metadata": {"name": "theirs"}, "data": {}})
    theirs = {"valueFrom": {"secretKeyRef": {"name": "theirs", "key": "a"}}}
    fetch = {"name": "fetch", "image": "mine", "env": [{"name": "HTTP_PROXY", **theirs}]}
    served.change(decode__podTemplate={"spec": {"initContainers": [fetch]}})
    served.turn()
    assert served.condition("Accepted")[:2] == ("False", "SecretNotAllowed")
    (job,) = served.cluster.of("Job")
    served.cluster.delete("Job", KEY[0], job["metadata"]["name"])
    served.woken.clear()
    served.repairs.heard(KEY, job, deleted=True)
    wait_for(lambda: served.woken)
    assert served.cluster.of("Job") == []
