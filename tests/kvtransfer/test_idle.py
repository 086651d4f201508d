"""A linked pair with nothing to do costs next to nothing."""

import resource
import time

import pytest
from tests.kvtransfer.builders import Consumer, Producer, make_config

SECONDS, LOOKS = 2.0, 3
"""What else this process does now and then must not be in every look."""
MOST = 0.01
"""Of a core, for both together."""


@pytest.mark.slow
def test_an_idle_pair_over_nixl_uses_less_than_a_hundredth_of_a_core(workers):
    """No thread spins: beats are all there is."""
    config = make_config(kv_connector="nixl", kv_beat_seconds=0.5, kv_beat_timeout=4.0)
    producer, consumer = workers(Producer, config), workers(Consumer, config)
    consumer.meet(producer)
    time.sleep(1.0)
    shares = [_share_of_a_core() for _ in range(LOOKS)]
    print("\nidle pair:", ", ".join(f"{share:.2%}" for share in shares), "of a core")
    assert min(shares) < MOST
    assert consumer.service.peer_up(producer.incarnation)


def _share_of_a_core() -> float:
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    time.sleep(SECONDS)
    after, took = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - started
    return (after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) / took
