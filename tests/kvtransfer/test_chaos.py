"""Whatever breaks and whenever: everything ends, everything is free, every link comes back."""

import time
from functools import partial
from typing import Any

import pytest
from tests.kvtransfer.chaos import STEP_SECONDS, Chaos, make_chaos
from tests.waiting import wait_for

pytestmark = pytest.mark.full


def endure(chaos: Chaos, count: int) -> None:
    """Hand-offs between random workers, while something breaks at every tenth."""
    for number in range(count):
        pair = chaos.draw.choice(chaos.producers), chaos.draw.choice(chaos.consumers)
        chaos.begin(f"c{number}", *pair)
        chaos.step()
        if chaos.draw.random() < 0.1:
            chaos.breaks()
        time.sleep(STEP_SECONDS)
    chaos.calm()
    assert chaos.loaded > count / 20


def serve_by_every_pair(chaos: Chaos) -> None:
    """Once more with nothing that breaks; a broken data connection shows at the first use of it."""
    chaos.at_odds, before = False, 0
    for time_of_it in ("first", "again"):
        before = chaos.loaded
        for p, producer in enumerate(chaos.producers):
            for c, consumer in enumerate(chaos.consumers):
                chaos.begin(f"{p}{c}{time_of_it}", producer, consumer)
        chaos.calm()
    assert chaos.loaded == before + len(chaos.producers) * len(chaos.consumers)


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["nixl", "tcp", "memory_blocks", "shm"])
def test_everything_ends_and_every_link_comes_back(workers, connector):
    """A hundred and fifty hand-offs; then every pair serves."""
    chaos = make_chaos(workers, connector, 5)
    endure(chaos, 150)
    serve_by_every_pair(chaos)


def _all_free(transport: Any) -> bool:
    ring = transport._landing.ring
    return bool(ring.free == len(ring))


@pytest.mark.slow
def test_everything_ends_though_agents_do_and_every_link_comes_back(workers, node):
    """The same by an agent of the node, which ends among all that breaks; no slot of it is held."""
    chaos = make_chaos(workers, "shm_agent", 5, node)
    endure(chaos, 150)
    serve_by_every_pair(chaos)
    for consumer in chaos.consumers:
        transport: Any = next(iter(consumer.service._mover.parts.transports.values()))
        wait_for(partial(_all_free, transport))


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
def test_everything_ends_though_agents_do_whatever_breaks_when(workers, node, seed):
    chaos = make_chaos(workers, "shm_agent", seed, node)
    endure(chaos, 600)
    serve_by_every_pair(chaos)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("connector", ["nixl", "tcp", "memory_blocks", "shm"])
def test_everything_ends_whatever_breaks_when(workers, connector, seed):
    chaos = make_chaos(workers, connector, seed)
    endure(chaos, 600)
    serve_by_every_pair(chaos)
