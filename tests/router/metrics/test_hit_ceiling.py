"""The ceiling of the hit rate: the estimate of distinct blocks, the window, and its series."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from tests.router.behaviours import Make
from tests.router.http_server import Served

from tandem.router.dispatch.placing import HALF_SECONDS, HitCeiling, Sketch


def hashes(begin: int, count: int) -> tuple[bytes, ...]:
    numbers = range(begin, begin + count)
    return tuple(hashlib.sha256(str(number).encode()).digest() for number in numbers)


@pytest.mark.parametrize("count", [0, 1, 100, 10_000, 100_000])
def test_distinct_hashes_are_counted(count: int) -> None:
    """Within 3 %, four times the standard error; repeated ones change nothing."""
    sketch = Sketch()
    sketch.add(hashes(0, count))
    found = sketch.count()
    assert found == pytest.approx(count, rel=0.03, abs=0.5)
    sketch.add(hashes(0, count // 2))
    assert sketch.count() == found


def test_sketches_join() -> None:
    left, right = Sketch(), Sketch()
    left.add(hashes(0, 6000))
    right.add(hashes(3000, 6000))
    assert left.joined(right).count() == pytest.approx(9000, rel=0.03)


def test_the_ceiling_is_what_could_have_been_found() -> None:
    """Of four times the same blocks three quarters; of what is gone from the window nothing."""
    now = [0.0]
    ceiling = HitCeiling(lambda: now[0])
    assert ceiling.read() is None
    for _ in range(4):
        ceiling.add(hashes(0, 1000))
    assert ceiling.read() == pytest.approx(0.75, abs=0.02)
    now[0] += HALF_SECONDS
    ceiling.add(hashes(0, 4000))  # a thousand of them known from the half before
    assert ceiling.read() == pytest.approx(0.5, abs=0.02)
    now[0] += HALF_SECONDS
    assert ceiling.read() == pytest.approx(0.0, abs=0.02)
    now[0] += 2 * HALF_SECONDS
    assert ceiling.read() is None


def test_it_is_a_series_of_the_router(serve: Callable[..., Served], decode: Make) -> None:
    """Absent before the first prompt; the same prompt twice could have been found once."""
    served = serve(decode())
    name = "tandem:router_prefix_hit_ceiling "
    assert not any(line.startswith(name) for line in served.metrics().splitlines())
    for _ in range(2):
        body = {"model": "fake", "prompt": "word " * 60, "max_tokens": 2}
        assert served.post("/v1/completions", json=body).is_success
    (line,) = (line for line in served.metrics().splitlines() if line.startswith(name))
    assert float(line.split()[1]) == pytest.approx(0.5, abs=0.01)
