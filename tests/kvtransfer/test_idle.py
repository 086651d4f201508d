"""A linked pair with nothing to do costs next to nothing."""

import time
from pathlib import Path

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config

SECONDS, LOOKS = 2.0, 3
"""What a machine does now and then must not be in every look."""
TASKS = Path("/proc/self/task")
BEATS = 2
"""Per second, of each end."""
MOST_WAKES = 50 * BEATS
"""Per second, of all threads together, which wake some twenty times for what both ends say and hear
of a beat: one that looked every hundredth of a second would wake as often as this alone."""
MOST = 0.05
"""Of a core, for both together: a thread that spins takes a whole one, on any machine."""


@pytest.mark.full
@pytest.mark.slow
def test_an_idle_pair_over_nixl_wakes_for_beats_alone(workers):
    """No thread spins, and none looks again and again: beats are all there is."""
    config = make_config(kv_connector="nixl", kv_beat_seconds=1 / BEATS, kv_beat_timeout=60.0)
    others = _threads()
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    time.sleep(1.0)
    looks: list[tuple[float, float]] = []
    while len(looks) < LOOKS and not (looks and _sleeps(*looks[-1])):
        looks.append(_look(others))
    wakes, share = looks[-1]
    print(f"\nidle pair: {wakes:.0f} wakes a second, {share:.2%} of a core")
    assert _sleeps(wakes, share), looks
    assert consumer.service.peer_up(producer.incarnation)


def _sleeps(wakes: float, share: float) -> bool:
    return 0 < wakes < MOST_WAKES and 0 < share < MOST


def _threads() -> set[Path]:
    return set(TASKS.iterdir())


def _look(others: set[Path]) -> tuple[float, float]:
    """Wakes per second and share of a core of all threads but this one and ``others``, whom earlier
    tests may have left behind."""
    before, started = _used(others), time.monotonic()
    time.sleep(SECONDS)
    took = time.monotonic() - started
    (woke, ran), (woke_before, ran_before) = _used(others), before
    return (woke - woke_before) / took, (ran - ran_before) / 1e9 / took


def _used(others: set[Path]) -> tuple[int, int]:
    """How often they have slept, and nanoseconds on a processor."""
    each = [_used_by(thread) for thread in _threads() - others]
    return sum(slept for slept, _ in each), sum(ran for _, ran in each)


def _used_by(thread: Path) -> tuple[int, int]:
    try:
        status = (thread / "status").read_text()
        slept = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
        return slept, int((thread / "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):  # ended since
        return 0, 0
