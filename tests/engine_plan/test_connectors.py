"""Several connectors as one: who is asked, who is told, and when blocks are free."""

from __future__ import annotations

import pytest
from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.handoff import Connector, ProducerSide
from tests.engine_plan.pair import produce

from tandem.engine.request import Request
from tandem.engine.scheduler.connector import Hold, Lookup, Remote
from tandem.engine.scheduler.connectors import Connectors, compose
from tandem.protocol.errors import RefusalCode
from tandem.protocol.ids import Incarnation
from tandem.protocol.kv import FirstToken, Loaded, Released
from tandem.protocol.requests import Pull


class Brings(Connector):
    """Says that some tokens lie with it, and keeps blocks if told to."""

    def __init__(self, remote: Remote, hold: Hold = Hold.FREE) -> None:
        super().__init__()
        self.remote, self.hold = remote, hold
        self.begun: list[range] = []

    def lookup(self, request: Request, num_local: int) -> Remote:
        self.calls.append(("lookup", request.key))
        return self.remote

    def begin_load(self, request, block_ids, tokens) -> None:
        self.begun.append(tokens)

    def finished(self, request: Request, why: str) -> Hold:
        super().finished(request, why)
        return self.hold


NOTHING, READY = Remote(Lookup.NOTHING), Remote(Lookup.READY, 16)


@pytest.fixture
def request_() -> Request:
    harness = Harness()
    harness.add(request_of("a"))
    (group,) = harness.core.scheduler.request_table.groups.values()
    return group.live[0]


def test_one_connector_is_itself():
    """An engine with one pays for no composition, one without any for none."""
    only = Connector()
    assert compose([]) is None
    assert compose([only]) is only
    assert isinstance(compose([only, Connector()]), Connectors)


def test_the_first_that_has_it_is_asked_to_bring_it(request_):
    """Lookups go in order and end with the first yes; who said it loads, also after a later yes."""
    first, second, third = Brings(NOTHING), Brings(READY), Brings(READY)
    every = Connectors([first, second, third])
    assert every.lookup(request_, 0) == READY
    assert third.calls == []
    every.begin_load(request_, ((1, 2),), range(16))
    assert (first.begun, second.begun, third.begun) == ([], [range(16)], [])
    second.remote = NOTHING
    assert every.lookup(request_, 0) == READY
    every.begin_load(request_, ((1, 2),), range(16))
    assert third.begun == [range(16)]


def test_a_refusal_lets_go_of_those_that_had_admitted():
    """The second connector's no is the answer; the first one hears that it has ended, once."""
    first, second, third = Connector(), ProducerSide(quota=0), Connector()
    harness = Harness(connector=Connectors([first, second, third]))
    request = produce("a")
    assert harness.add(request) is RefusalCode.CAPACITY
    assert first.calls == [("admit", request.key), ("finished", request.key)]
    assert second.calls == third.calls == []
    harness.check_empty()


def test_blocks_are_kept_until_the_last_lets_go(request_):
    """Two of three keep them: one Released of two is swallowed."""
    members = [Brings(NOTHING, Hold.KEPT), Brings(NOTHING), Brings(NOTHING, Hold.KEPT)]
    every = Connectors(members)
    assert every.finished(request_, "stop") is Hold.KEPT
    released = Released(request_.key)
    members[2].events.append(released)
    assert every.poll() == []
    members[0].events.append(released)
    assert list(every.poll()) == [released]
    assert Connectors([Brings(NOTHING), Brings(NOTHING)]).finished(request_, "stop") is Hold.FREE


def test_a_release_that_nobody_held_passes(request_):
    """Blocks of a failed load that may still be written were kept by the engine itself."""
    members = [Connector(), Connector()]
    members[1].events.append(Released(request_.key))
    assert list(Connectors(members).poll()) == [Released(request_.key)]


def test_everybody_hears_of_ends_and_cancels(request_):
    """Events come from all, cancels go to all, and any promise keeps the loop awake."""
    members = [Connector(), Connector()]
    every = Connectors(members)
    every.cancelled(request_.key)
    assert [each.calls for each in members] == [[("cancelled", request_.key)]] * 2
    assert not every.has_pending()
    loaded = [Loaded(request_.key, (FirstToken(0, each),)) for each in range(2)]
    for member, event in zip(members, loaded, strict=True):
        member.events.append(event)
    assert every.has_pending()
    assert list(every.poll()) == loaded


def test_who_waited_for_the_quota_is_asked_for_a_loan_in_its_turn_alone():
    """A peer that is asked lends at once, and what it lends is held there until blocks are free
    here."""
    producer, lends = ProducerSide(), Brings(Remote(Lookup.LATER, lent=True))
    harness = Harness(8, connector=compose([producer, lends]), max_num_seqs=4)
    producer.may_start = False
    pulled = produce("a", 64, pull=Pull(Incarnation(b"q" * 16), 48, 1000))
    assert harness.add(pulled) is None
    harness.step()
    asked = ("lookup", pulled.key)
    assert harness.core.stats()["parked"] == 1
    assert asked not in lends.calls
    large = request_of("b", 100, params=params_of(max_tokens=20, ignore_eos=True))
    lends.remote = NOTHING
    assert harness.add(large) is None
    harness.step()
    harness.step()
    lends.remote = Remote(Lookup.LATER, lent=True)
    producer.may_start = True
    while harness.core.holds(large.key):
        assert asked not in lends.calls, "no block is free"
        harness.step()
    harness.step()
    assert asked in lends.calls
    lends.remote = NOTHING
    while harness.core.holds(pulled.key):
        harness.step()
    producer.release(pulled.key)
    harness.run()
    harness.check_empty()
