"""P hears anything from a consumer that has a link and from those that have none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import zmq
from hypothesis import given
from tests.hand_link import HandLink
from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key, only
from tests.kvtransfer.fuzz.words import NAMES, TO_PRODUCER, Word, fuzzing, is_garbage, words
from tests.waiting import SECONDS

from tandem.kvtransfer.handoff.messages import (
    Probe,
    ProbeReady,
    decode_to_consumer,
    decode_to_producer,
)
from tandem.kvtransfer.handoff.tables import PState
from tandem.kvtransfer.mover.make_slots import pattern
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.link import read_header
from tandem.protocol.messages import Welcome, encode

pytestmark = pytest.mark.nightly

FENCE = 987_654_321
_numbers = itertools.count()
GARBAGE = "tandem:kv_garbage_frames_total"


class Caller:
    """A consumer's connection, with its HELLO said and answered."""

    def __init__(self, producer: Producer, connector: str) -> None:
        self.producer = producer
        self.me = new_incarnation()
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(f"tcp://{producer.service.control}")
        self.connector = connector
        try:
            self.fence()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.socket.close()

    def greet(self) -> None:
        self.link = HandLink(self.me)
        terms = replace(self.producer.service._channel.terms, me=self.me)
        hello = terms.hello((self.connector,))
        self.socket.send_multipart([self.link.seal(), encode(hello)])
        self.until(Welcome)
        self.link.peer = self.producer.incarnation

    def until(self, kind: type) -> object:
        """The next message of a kind; others are let go by."""
        while True:
            assert self.socket.poll(int(1000 * SECONDS)), f"no {kind.__name__} came"
            head, payload = self.socket.recv_multipart()
            read_header(head)
            message = decode_to_consumer(payload)
            if isinstance(message, kind):
                return message

    def fence(self) -> None:
        """All that was said is through both threads of P."""
        self.greet()
        self.through()

    def through(self) -> None:
        """P's transfer thread has heard of the link."""
        self.socket.send_multipart([self.link.seal(), encode(Probe(FENCE))])
        while True:
            ready = self.until(ProbeReady)
            assert isinstance(ready, ProbeReady)
            if ready.number == FENCE:
                return


class Stage:
    """A producer, a consumer that follows the protocol, and a hand-off of its own under way."""

    def __init__(self, connector: str) -> None:
        self.connector = connector
        config = make_config(kv_connector=connector, kv_lease_seconds=600.0, kv_beat_timeout=20.0)
        self.producer, self.consumer = Producer(config), Consumer(config)
        self.consumer.meet(self.producer)
        self.theirs = make_key("theirs")
        admitted = self.producer.admit(self.theirs, 12, self.consumer.incarnation, 600_000)
        assert admitted is None
        self.producer.compute(self.theirs, 12, [60, 61, 62])
        self.kv_cache = self.producer.kv_cache.clone()

    def close(self) -> None:
        self.consumer.service.close()
        self.producer.service.close()

    def lease(self, key: RequestKey, caller: Caller) -> None:
        """A hand-off for the caller: computed, and held till it ends."""
        assert self.producer.admit(key, 12, caller.me, 600_000) is None
        self.producer.service.computed(key, only([1, 2, 3]), 12, _Done())
        self.producer.end(key)

    def check(self, mine: RequestKey) -> None:
        producer, mover = self.producer, self.producer.service._mover
        assert producer.service.problem() is None
        producer.until(lambda: any(each.key == mine for each in producer.seen))
        producer.seen.clear()
        export = mover.table.exports[self.theirs]
        assert export.state is PState.COMPUTING
        assert export.consumer == self.consumer.incarnation
        ring = mover.table.ring
        producer.until(lambda: ring.free == len(ring))
        assert producer.kv_cache.equal(self.kv_cache)
        own = mover.memory.read(mover.config.kv_slots, 64)
        assert own == pattern(producer.incarnation, mover._pattern_bytes)[:64]
        assert self.consumer.service.peer_up(producer.incarnation)

    def serves(self) -> bool:
        """Whether the consumer has a request's KV, at P's last word, as if nothing had been."""
        key = make_key(f"after{next(_numbers)}")
        self.consumer.open(key, self.producer.incarnation)
        self.producer.hand_over(key, 12, [10, 11, 12], self.consumer.incarnation)
        self.consumer.load(key, [5, 6, 7])
        self.consumer.until(lambda: self.consumer.holds(key.request, 12, [5, 6, 7]))
        self.producer.until(lambda: any(each.key == key for each in self.producer.seen))
        self.kv_cache = self.producer.kv_cache.clone()
        return self.consumer.holds(key.request, 12, [5, 6, 7])


class _Done:
    def done(self) -> bool:
        return True


@pytest.fixture(scope="module", params=["tcp", "shm"])
def stage(request) -> Iterator[Stage]:
    """Kept over all examples: what one leaves behind the next one meets."""
    made = Stage(request.param)
    yield made
    made.close()


@fuzzing(60)
@given(said=words(TO_PRODUCER))
def test_whatever_a_consumer_says_only_its_own_ends(stage: Stage, said: list[Word]) -> None:
    """Garbage is counted to the frame; a hand-off of another's is not touched; what the caller held
    is free with its link; nothing of P's memory is written."""
    with closing(Caller(stage.producer, stage.connector)) as caller:
        _say(stage, caller, said)


def _say(stage: Stage, caller: Caller, said: list[Word]) -> None:
    number = next(_numbers)
    keys = {name: make_key(f"{name}{number}") for name in NAMES} | {"theirs": stage.theirs}
    stage.lease(keys["mine"], caller)
    before, expected = stage.producer.metric(GARBAGE, port="control"), 0
    for word in said:
        parts = word.parts(caller.link, keys)
        expected += is_garbage(parts, decode_to_producer)
        caller.socket.send_multipart(parts)
    caller.fence()
    caller.close()
    assert stage.producer.metric(GARBAGE, port="control") == before + expected
    stage.check(keys["mine"])


def test_after_all_that_it_serves(stage: Stage) -> None:
    """The link that stood all the while still brings KV."""
    assert stage.serves()
