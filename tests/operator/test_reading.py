"""Resources are read by several threads from the first moment on."""

from __future__ import annotations

import subprocess
import sys

from tests.operator.builders import service

from tandem.operator.api.reading import spec_of, status_of

THREADS = """
import random, sys, threading, time
from tests.operator.builders import service
from tandem.operator.api.reading import spec_of, status_of

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
