"""A guard of the agent, or of who asks it, taken out: a scenario that holds with it breaks.

The model checker finds the guards of the protocol in its worlds (../model/test_model_agent.py);
here are real memory, sockets and threads.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.kvtransfer.agent import test_agent, test_agent_strangers
from tests.kvtransfer.agent.agents import AgentWorker, Running
from tests.kvtransfer.mapped.test_mapped import block, until
from tests.kvtransfer.model.mutations import NoQuarantine
from tests.kvtransfer.test_mutants import harm_of

from tandem.kvtransfer.handoff.pull import SlotRing
from tandem.kvtransfer.nodeagent import registrations
from tandem.kvtransfer.nodeagent.registrations import Producer
from tandem.kvtransfer.transports.agent import landing
from tandem.kvtransfer.transports.agent.landing import Asker
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped.copiers import PeerTags
from tandem.memory import shared

pytestmark = pytest.mark.full


@contextlib.contextmanager
def _ends() -> Iterator[tuple[Path, pytest.MonkeyPatch, AgentWorker, AgentWorker]]:
    """A folder, a patch, a consumer and a producer."""
    with (
        tempfile.TemporaryDirectory(prefix="kv-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(name)
        consumer, producer = AgentWorker(folder, 0), AgentWorker(folder, 7)
        consumer.transport.receive(consumer.slots, consumer.blocks)
        try:
            yield folder, patch, consumer, producer
        finally:
            consumer.transport.stop()
            producer.transport.stop()


def a_slot_of_a_lost_link(_: Any) -> None:
    with _ends() as (folder, patch, _, producer):
        test_agent.test_a_slot_that_nobody_wants_is_not_used_before_its_copy_has_ended(
            folder, patch, producer
        )


def an_agent_that_ends(_: Any) -> None:
    with _ends() as ends:
        test_agent.test_an_agent_that_ends_fails_what_it_has_not_answered(*ends)


def a_tag_that_comes_back(_: Any) -> None:
    with _ends() as ends:
        test_agent.test_a_tag_that_went_and_came_back_during_the_copy_counts_as_cleared(*ends)


def memory_under_a_copy(_: Any) -> None:
    with _ends() as ends:
        test_agent.test_memory_stays_while_it_is_copied_from(*ends)


def a_wrong_secret(_: Any) -> None:
    with _ends() as (folder, _, consumer, producer):
        running = Running(folder)
        peer = test_agent.linked(consumer, producer)
        consumer.transport._secrets[peer] = bytes(32)
        assert test_agent.read(consumer, peer, block(0, 0)) is Progress.FAILED
        running.stop()
        assert running.agent.counts["copies"] == 0


def an_agent_without_the_key(_: Any) -> None:
    with _ends() as (folder, _, consumer, _producer):
        test_agent_strangers.test_an_agent_that_has_not_the_producers_key_brings_nothing(
            folder, consumer, "none"
        )


def holes_in_a_ring(_: Any) -> None:
    with _ends() as (folder, _, _consumer, producer):
        running = Running(folder)
        test_agent_strangers.test_a_ring_cannot_be_punched_once_it_is_registered(
            running, folder, producer
        )
        running.stop()


def places_beyond_the_end(_: Any) -> None:
    with _ends() as (folder, _, consumer, producer):
        running = Running(folder)
        test_agent.test_what_lies_outside_is_not_touched(
            running, consumer, producer, block(0, 1, shift=1)
        )
        running.stop()


def a_producer_that_another_would_be(_: Any) -> None:
    """Its incarnation is registered: who has not its secret is rejected, and it is asked on."""
    with _ends() as (folder, _, consumer, producer):
        running = Running(folder)
        peer = test_agent.linked(consumer, producer)
        other = AgentWorker(folder, 9)
        other.transport._incarnation = peer
        other.transport.serve(other.slots, other.blocks)
        until(lambda: running.agent.counts["rejected"] > 0)
        assert test_agent.read(consumer, peer, block(0, 0)) is Progress.DONE
        assert consumer.kv_cache[0, 0] == 7
        other.transport.stop()
        running.stop()


_register = Asker._register
_kept: list[Any] = []


def _same_slots(asker: Asker, line: Any, hello: Any) -> None:
    made = asker._copier.make

    class Keeping:
        def __getattr__(self, name: str) -> Any:
            return getattr(copier, name)

        def make(self, size: int) -> Any:
            _kept[1:] = []
            _kept.append(_kept[0] if _kept else made(size))
            return _kept[0]

    copier, asker._copier = asker._copier, Keeping()
    _register(asker, line, hello)
    asker._copier = copier


def _close_at_once(producer: Producer) -> None:
    for each in producer.sources.values():
        each.close()
    producer.tags = None


GUARDS: dict[str, tuple[object, str, object, Callable[[Any], None]]] = {
    "the quarantine of landing slots": (
        SlotRing,
        "quarantine",
        NoQuarantine.quarantine,
        a_slot_of_a_lost_link,
    ),
    "new slots for each agent": (Asker, "_register", _same_slots, an_agent_that_ends),
    "the turns of tags": (
        PeerTags,
        "tags_of",
        lambda tags, blocks, _: tags._tags[blocks].tobytes(),
        a_tag_that_comes_back,
    ),
    "unmapping behind the last copy": (Producer, "close", _close_at_once, memory_under_a_copy),
    "the producer's secret": (registrations, "is_proof", lambda *_: True, a_wrong_secret),
    "the agent's proof": (landing, "is_proof", lambda *_: True, an_agent_without_the_key),
    "the seals of a ring": (shared, "_SHARED", 0x2 | 0x4, holes_in_a_ring),
    "the bounds of memory": (registrations, "_is_within", lambda *_: True, places_beyond_the_end),
}


def test_an_incarnation_is_its_owners_alone() -> None:
    a_producer_that_another_would_be(None)


@pytest.mark.parametrize("guard", GUARDS)
def test_with_its_guard_the_scenario_holds(guard: str) -> None:
    assert harm_of(GUARDS[guard][3], lambda: None) == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("guard", GUARDS)
def test_without_its_guard_the_scenario_breaks(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario sees the harm, and so the guard is in use."""
    where, name, mutant, scenario = GUARDS[guard]
    monkeypatch.setattr(where, name, mutant)
    assert harm_of(scenario, lambda: None)
