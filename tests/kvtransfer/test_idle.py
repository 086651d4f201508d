"""A linked pair with nothing to do costs next to nothing."""

import time
from pathlib import Path

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config

SECONDS, LOOKS = 2.0, 3
"""What a machine does now and then must not be in every look."""
TASKS = Path("/proc/self/task")
MOST = 0.01
"""Of a core, for both together."""


@pytest.mark.slow
def test_an_idle_pair_over_nixl_uses_less_than_a_hundredth_of_a_core(workers):
    """No thread spins: beats are all there is."""
    config = make_config(kv_connector="nixl", kv_beat_seconds=0.5, kv_beat_timeout=4.0)
    others = _threads()
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    time.sleep(1.0)
    shares = [_share_of_a_core(others) for _ in range(LOOKS)]
    print("\nidle pair:", ", ".join(f"{share:.2%}" for share in shares), "of a core")
    assert 0 < min(shares) < MOST
    assert consumer.service.peer_up(producer.incarnation)


def _threads() -> set[Path]:
    return set(TASKS.iterdir())


def _share_of_a_core(others: set[Path]) -> float:
    """Of all threads but ``others``, whom earlier tests may have left behind."""
    before, started = _seconds_on_cpu(others), time.monotonic()
    time.sleep(SECONDS)
    return (_seconds_on_cpu(others) - before) / (time.monotonic() - started)


def _seconds_on_cpu(others: set[Path]) -> float:
    return sum(_nanoseconds_on_cpu(each) for each in _threads() - others) / 1e9


def _nanoseconds_on_cpu(thread: Path) -> int:
    try:
        return int((thread / "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):  # ended since
        return 0
