"""How fast drift is repaired, over every child, on a real API server."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.operator.harness import Harness, OperatorProcess

from tandem.operator.cluster.store import CHILDREN

REPAIR_SECONDS = 5.0
SETTLED = {"Pod"}
"""Kinds that belong to other controllers."""
BURNERS, STARVED = 4, 10
"""Busy processes, and how nice the operator is to them: a twentieth of a core is left for it."""

Child = tuple[str, str]

EDITS: dict[str, dict[str, Any]] = {
    "ConfigMap": {"data": {"stranger": "x"}},
    "Deployment": {"spec": {"replicas": 0}},
    "NetworkPolicy": {"spec": {"ingress": [{}]}},
    "PodDisruptionBudget": {"spec": {"maxUnavailable": 9}},
    "Role": {"rules": []},
    "Service": {"spec": {"selector": {"a": "b"}}},
}


def children(harness: Harness) -> list[Child]:
    """Everything that the operator made, keys aside: their loss is a rotation."""
    found = [
        (kind, name)
        for kind in CHILDREN
        if kind not in SETTLED
        for name in sorted(harness.names(kind))
        if name.startswith("demo")
    ]
    return [(kind, name) for kind, name in found if not (kind == "Secret" and "-keys-" in name)]


def read(harness: Harness, child: Child) -> dict[str, Any] | None:
    return harness.cluster.get(child[0], harness.namespace, child[1])


def after_deletion(harness: Harness, child: Child) -> float:
    """Delete a child; seconds until another is there."""
    before = read(harness, child)
    assert before is not None, child
    harness.cluster.delete(child[0], harness.namespace, child[1])

    def is_back() -> bool:
        now = read(harness, child)
        return now is not None and now["metadata"]["uid"] != before["metadata"]["uid"]

    return harness.wait(is_back, text=f"{child} is back")


def after_edit(harness: Harness, child: Child) -> float:
    """Edit a child by hand; seconds until it is as it was."""
    before = read(harness, child)
    assert before is not None, child
    patch = json.dumps(EDITS[child[0]])
    harness.kubectl("patch", child[0].lower(), child[1], "--type=merge", "-p", patch)

    def is_right() -> bool:
        now = read(harness, child)
        return now is not None and all(now[key] == before[key] for key in EDITS[child[0]])

    return harness.wait(is_right, text=f"{child} is as it was")


def repair_times(harness: Harness) -> dict[str, float]:
    """Seconds for each deletion and each edit."""
    took = {f"delete {c}": in_time(after_deletion, harness, c) for c in children(harness)}
    some = [child for child in children(harness) if child[0] in EDITS]
    return took | {f"edit {child}": in_time(after_edit, harness, child) for child in some}


def in_time(repair: Callable[[Harness, Child], float], harness: Harness, child: Child) -> float:
    """Seconds that a repair takes. One that was late is tried again: a machine that stands still
    once is no fault, and what waits for the next list is late again."""
    took = repair(harness, child)
    return took if took < REPAIR_SECONDS else min(took, repair(harness, child))


def report(took: dict[str, float]) -> str:
    slow = max(took, key=lambda what: took[what])
    middle = statistics.median(took.values())
    return f"{len(took)} repairs: median {middle:.2f} s, slowest {took[slow]:.2f} s ({slow})"


@pytest.mark.nightly
def test_every_child_is_soon_as_it_shall_be(harness: Harness):
    """Deleted or edited, each of all kinds is right again within five seconds."""
    harness.create(decode__scaling={"mode": "External"})
    harness.ready()
    took = repair_times(harness)
    print(report(took))
    assert {what.split("'")[1] for what in took} == set(CHILDREN) - SETTLED
    assert max(took.values()) < REPAIR_SECONDS, report(took)


@pytest.fixture
def busy(operator: OperatorProcess) -> Iterator[None]:
    """A node without time for the operator; afterwards it has it again."""
    tasks = Path(f"/proc/{operator.process.pid}/task")
    for task in tasks.iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), STARVED)
    code = "while True: pass"
    burning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(BURNERS)]
    yield
    for process in burning:
        process.kill()
        process.wait()
    for task in tasks.iterdir():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 0)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_repair_does_not_wait_on_a_busy_node(harness: Harness, request: pytest.FixtureRequest):
    """The same while others take nearly all of the processors."""
    harness.create(decode__scaling={"mode": "External"})
    harness.ready()
    request.getfixturevalue("busy")
    took = repair_times(harness)
    print(report(took))
    assert max(took.values()) < REPAIR_SECONDS, report(took)
