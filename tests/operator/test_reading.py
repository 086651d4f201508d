"""Resources are read by several threads from the first moment on."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from tests.operator.builders import DEMO, service

from tandem.operator.api.service import Unreadable, spec_of, status_of
from tandem.operator.api.status import Condition, Reason
from tandem.operator.decide.words import Word
from tandem.operator.reconcile.status_writer import refused_conditions

BAD: Word = ("False", Reason.INVALID_SPEC, "spec.model: bad")

THREADS = """
import random, sys, threading, time
from tests.operator.builders import service
from tandem.operator.api.service import spec_of, status_of

sys.setswitchinterval(1e-6)
barrier = threading.Barrier(12)

def read():
    barrier.wait()
    time.sleep(random.random() * 0.004)  # one is in the middle of it when another begins
    spec_of(service())
    status_of({"status": {"conditions": []}})

threads = [threading.Thread(target=read) for _ in range(12)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def test_first_readers_may_be_many():
    """msgspec would end the interpreter here (23 of 24 times) if types were not built before."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", THREADS], check=False, timeout=60)
        assert done.returncode == 0


def test_a_status_that_cannot_be_read_is_made_anew():
    """Another version may have written it; the spec is never guessed at."""
    assert spec_of(service()).model.name == "smollm2"
    assert status_of({"status": {"conditions": 7}}) == status_of({})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"model": 1}, "spec.model: Expected `object`, got `int`"),
        ({**DEMO, "decode": {"podTemplate": ["x"]}}, "spec.decode.podTemplate: Expected `object"),
        ({**DEMO, "decode": {"replicas": 10**30}}, "spec.decode.replicas: Expected `int`"),
    ],
)
def test_a_spec_of_another_shape_is_named_by_its_field(spec: dict[str, Any], said: str):
    """An object that an older CRD let through: the operator says which field it cannot read."""
    with pytest.raises(Unreadable) as raised:
        spec_of({"spec": spec})
    assert str(raised.value).startswith(said)


def test_a_resource_without_a_spec_is_unreadable():
    with pytest.raises(Unreadable, match="spec: it is missing"):
        spec_of({})


def test_what_cannot_be_read_is_neither_accepted_nor_ready():
    """So that no column of `kubectl get` is empty; a second look changes nothing."""
    found = refused_conditions([], BAD, 3, 0.0)
    assert [(each.type, each.status, each.reason) for each in found] == [
        ("Accepted", "False", "InvalidSpec"),
        ("Ready", "False", "InvalidSpec"),
    ]
    assert refused_conditions(found, BAD, 3, 99.0) == found


def test_what_serves_stays_ready_when_its_next_spec_cannot_be_read():
    """Nothing was touched, so that Ready says what it said."""
    ready = Condition(
        type="Ready", status="True", reason="Ready", message="", last_transition_time="x"
    )
    found = {each.type: each for each in refused_conditions([ready], BAD, 3, 0.0)}
    assert found["Ready"] == ready
    assert found["Accepted"].status == "False"
