"""D hears anything from a producer: cards that lie, parts that nobody may have, words out of place.

The producer here is this file: its control socket is written by hand, its bytes are served by a
real transport, so that what D takes for right it also reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import zmq
from hypothesis import example, given
from hypothesis import strategies as st
from tests.hand_link import HandLink
from tests.kvtransfer.builders import LAYOUT, NUM_BLOCKS, Consumer, make_config, make_key
from tests.kvtransfer.fuzz.words import NAMES, ODD, TO_CONSUMER, Spoil, Word, fuzzing, words
from tests.waiting import SECONDS

from tandem.kvtransfer import events
from tandem.kvtransfer.handoff.manifest import Item
from tandem.kvtransfer.handoff.messages import (
    Done,
    Final,
    Open,
    Part,
    Probe,
    ProbeReady,
    ProducerCard,
    Ready,
    Want,
    decode_to_consumer,
    decode_to_producer,
)
from tandem.kvtransfer.memory.blocks import Blocks, SharedTags
from tandem.kvtransfer.memory.packing import HEADER_BYTES
from tandem.kvtransfer.memory.slots import SharedSlots
from tandem.kvtransfer.mover.make_slots import pattern
from tandem.kvtransfer.service.parts import make_transports
from tandem.kvtransfer.transports.base import Transport
from tandem.memory.shared import shared_tensor
from tandem.protocol.card import KVKind
from tandem.protocol.errors import WireError
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.link import read_header
from tandem.protocol.messages import Hello, Reset, Welcome, encode

pytestmark = pytest.mark.nightly

SLOT, SLOTS = 4096, 4
TOKENS, TARGET = 12, [5, 6, 7]
CANARY = 0xA5
FENCE = make_key("fence")
ENDINGS = (events.Loaded, events.LoadFailed, events.Cancelled)
GARBAGE = "tandem:kv_garbage_frames_total"
_numbers = itertools.count()


class Liar:
    """A producer that says what it is told to."""

    def __init__(self, connector: str) -> None:
        self.me = new_incarnation()
        self.connector = connector
        config = make_config(kv_connector=connector)
        self.transports: dict[str, Transport] = make_transports(config, self.me, "producer")
        kv_cache = shared_tensor(NUM_BLOCKS * LAYOUT.block_bytes).fill_(7).view(NUM_BLOCKS, -1)
        self.slots, blocks = SharedSlots(SLOTS + 1, SLOT), Blocks(kv_cache, SharedTags(NUM_BLOCKS))
        self.slots.write(SLOTS, pattern(self.me, SLOT))
        self.card = self.transports[connector].serve(self.slots, blocks)
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.port: int = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.link = HandLink(self.me)
        self.caller = b""

    def close(self) -> None:
        self.socket.close()
        for each in self.transports.values():
            each.stop()

    def welcome(self, **changes: Any) -> Welcome[ProducerCard]:
        """The right one, but for ``changes``."""
        card = ProducerCard(
            connector=self.connector,
            card=self.card,
            slot_bytes=SLOT,
            num_slots=SLOTS,
            block_bytes=LAYOUT.block_bytes,
            num_blocks=NUM_BLOCKS,
            groups=("full_attention",),
            block_size=LAYOUT.block_size,
            dtypes=tuple(each.dtype for each in LAYOUT.groups),
        )
        return Welcome(msgspec.structs.replace(card, **changes))

    def receive(self, seconds: float = SECONDS) -> Any:
        if not self.socket.poll(int(1000 * seconds)):
            return None
        self.caller, head, payload = self.socket.recv_multipart()
        message = decode_to_producer(payload)
        if isinstance(message, Hello):
            self.link = HandLink(self.me, read_header(head).source)
        return message

    def until(self, *kinds: type) -> Any:
        """The next message of one of these kinds; RESET ends the waiting, too."""
        while True:
            message = self.receive()
            assert message is not None, f"D never said {kinds}"
            if isinstance(message, (*kinds, Reset)):
                return message

    def send_message(self, *messages: Any) -> None:
        for message in messages:
            self.send([self.link.seal(), encode(message)])

    def send(self, parts: list[bytes]) -> None:
        self.socket.send_multipart([self.caller, *parts])

    def fence(self) -> None:
        """D's two threads have heard all that was said, or have given this link up."""
        self.send_message(Ready(FENCE, 1, 1, (Item(0, KVKind.FULL, 0, 1),)))
        while True:
            message = self.until(Done, Hello)
            if not isinstance(message, Done) or message.key == FENCE:
                return


@dataclass
class Stage:
    consumer: Consumer
    connector: str

    def check(self, asked: RequestKey | None) -> None:
        consumer = self.consumer
        assert consumer.service.problem() is None
        if asked is not None:
            consumer.service.cancel(asked)
            consumer.until(lambda: [e for e in consumer.seen if isinstance(e, ENDINGS)])
            told = [each for each in consumer.seen if isinstance(each, ENDINGS)]
            assert [each.key for each in told] == [asked]
        consumer.until(lambda: not consumer.service.has_pending())
        ring = consumer.service._mover.table.ring
        consumer.until(lambda: ring.free == len(ring))
        consumer.seen.clear()
        others = [block for block in range(NUM_BLOCKS) if block not in TARGET]
        assert (consumer.kv_cache[others] == CANARY).all()
        consumer.kv_cache[TARGET] = CANARY

    def meet(self, liar: Liar) -> None:
        self.consumer.service.set_peers([f"127.0.0.1:{liar.port}"])
        assert isinstance(liar.until(Hello), Hello)


@pytest.fixture(scope="module", params=["tcp", "shm"])
def stage(request) -> Iterator[Stage]:
    """Kept over all examples: what one leaves behind the next one meets."""
    config = make_config(kv_connector=request.param, kv_beat_timeout=20.0, kv_commit_seconds=0.2)
    consumer = Consumer(config)
    consumer.kv_cache.fill_(CANARY)
    yield Stage(consumer, request.param)
    consumer.service.close()


_BIG = st.sampled_from([0, 1, 2, SLOTS, 255, 4096, 1 << 24, (1 << 40) - 1, 1 << 40, (1 << 40) + 1])
_GROUPS = st.lists(st.sampled_from(["full_attention", "latent", "x"]), max_size=2).map(tuple)
_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "connector": st.sampled_from(["tcp", "shm", "memory", "nothing", "", "x" * 33]),
        "card": st.binary(max_size=60),
        "slot_bytes": _BIG,
        "num_slots": _BIG,
        "block_bytes": _BIG,
        "num_blocks": _BIG,
        "groups": _GROUPS,
    },
)


@fuzzing(30)
@given(changes=_CHANGES, nbytes=_BIG)
@example(changes={"connector": "nothing"}, nbytes=SLOT)
@example(changes={"slot_bytes": 1 << 40, "num_slots": 1 << 24}, nbytes=SLOT)
def test_whatever_a_card_says_only_its_link_fails(
    stage: Stage, changes: dict[str, Any], nbytes: int
) -> None:
    """A transport that D has not, places that are nowhere, sizes of nothing: no link, or one whose
    probe fails, and D goes on."""
    with closing(Liar(stage.connector)) as liar:
        stage.meet(liar)
        liar.send_message(liar.welcome(**changes))
        heard = liar.receive(0.3)
        if isinstance(heard, Probe):
            liar.send_message(ProbeReady(heard.number, nbytes))
            liar.receive(0.2)
        stage.consumer.service.set_peers([])
        stage.check(None)


def _deep(liar: Liar, stage: Stage, key: RequestKey, depth: int) -> None:
    """A hand-off that goes well so far: opened, announced, wanted (or copied), a part (or the
    blocks), all said."""
    copied, whole = liar.connector == "shm", (Item(0, KVKind.FULL, 0, TOKENS),)
    named = (tuple(range(len(TARGET))),) if copied else ()
    stage.consumer.open(key, liar.me)
    liar.until(Open)
    if depth > 0:
        early = copied and depth < 3
        empty = ((),) if copied else ()
        upto, blocks = (0, empty) if early else (TOKENS, named)
        liar.send_message(Ready(key, upto, TOKENS, whole, blocks))
    if depth > 1:
        stage.consumer.load(key, TARGET)
        if not copied:
            liar.until(Want)
    if depth > 2 and not copied:
        liar.send_message(Part(key, 0, 0, 4, 0, HEADER_BYTES + LAYOUT.block_bytes))
    if depth > 3:
        liar.send_message(Final(key, (FirstToken(0, 42),)))


_PARTS = st.builds(
    Part,
    st.just(RequestKey(b"R" * 16, "mine", 0)),
    st.integers(0, 2),
    st.sampled_from([0, 4, 8]),
    st.sampled_from([4, 8, 12, 16]),
    st.sampled_from([0, 3, 4, 5, 1 << 24]),
    st.sampled_from([n * LAYOUT.block_bytes + h for n in (1, 2, 3) for h in (0, HEADER_BYTES)]),
    st.integers(0, 1),
)
_READYS = st.builds(
    Ready,
    st.just(RequestKey(b"R" * 16, "mine", 0)),
    st.sampled_from([0, 4, TOKENS, TOKENS + 1]),
    st.just(TOKENS),
    st.just((Item(0, KVKind.FULL, 0, TOKENS),)),
    st.lists(
        st.lists(st.integers(0, NUM_BLOCKS) | st.just(1 << 24), max_size=4).map(tuple), max_size=2
    ).map(tuple),
)
"""Blocks that D copies, or refuses to."""


@fuzzing(60)
@given(depth=st.integers(0, 4), said=words(_PARTS | _READYS | TO_CONSUMER))
def test_whatever_a_producer_says_only_its_own_ends(
    stage: Stage, depth: int, said: list[Word]
) -> None:
    """However far a hand-off has come: it ends once, no slot is kept, and D writes nothing but the
    blocks that were given for it."""
    with closing(Liar(stage.connector)) as liar:
        stage.meet(liar)
        liar.send_message(liar.welcome())
        probe = liar.until(Probe)
        liar.send_message(ProbeReady(probe.number, SLOT))
        stage.consumer.until(lambda: stage.consumer.service.peer_up(liar.me))
        number = next(_numbers)
        keys = {name: make_key(f"{name}{number}") for name in NAMES}
        _deep(liar, stage, keys["mine"], depth)
        for word in said:
            liar.send(word.parts(liar.link, keys))
        liar.fence()
        stage.check(keys["mine"])


_SPOILED = st.tuples(TO_CONSUMER, st.sampled_from(Spoil), st.integers(0, 300))


@fuzzing(30)
@given(said=st.lists(_SPOILED, max_size=9))
def test_garbage_is_counted_and_ends_nothing(stage: Stage, said: list[Any]) -> None:
    """What is no message changes nothing: the link stands, and each is counted."""
    with closing(Liar(stage.connector)) as liar:
        stage.meet(liar)
        liar.send_message(liar.welcome())
        probe = liar.until(Probe)
        before, sent = stage.consumer.metric(GARBAGE, port="control"), 0
        keys = {name: make_key(name) for name in NAMES}
        for number, (message, spoil, at) in enumerate(said):
            payload = Word(message, spoil, at=at, value=ODD[number]).payload(keys)
            if _is_message(payload):
                continue
            head = liar.link.seal()
            liar.link._sent -= 1
            liar.send([head, payload])
            sent += 1
        liar.send_message(ProbeReady(probe.number, SLOT))
        stage.consumer.until(lambda: stage.consumer.service.peer_up(liar.me))
        assert stage.consumer.metric(GARBAGE, port="control") == before + sent
        stage.check(None)


def _is_message(payload: bytes) -> bool:
    try:
        decode_to_consumer(payload)
    except WireError:
        return False
    return True


def test_the_canary_is_seen(stage: Stage) -> None:
    """What the examples look at is D's real slab: a byte elsewhere is found."""
    stage.consumer.kv_cache[0, 0] = 1
    with pytest.raises(AssertionError):
        stage.check(None)
    stage.consumer.kv_cache[0, 0] = CANARY
    assert torch.count_nonzero(stage.consumer.kv_cache != CANARY) == 0
