"""Whatever comes to the control and data ports: counted, dropped, and nothing ends."""

import os
import random
import socket
import time

import pytest
import zmq
from tests.hand_link import HandLink
from tests.kvtransfer.builders import Producer, make_config, make_key
from tests.waiting import SECONDS

from tandem.kvtransfer.errors import AddressInUse
from tandem.kvtransfer.handoff.messages import MAX_MESSAGE_BYTES, Open, ProducerCard
from tandem.kvtransfer.transports.tcp_server import GREETING, MAGIC, REQUEST, decode_card
from tandem.protocol.ids import new_incarnation
from tandem.protocol.link import HEADER_BYTES
from tandem.protocol.messages import Welcome, encode


def _send(endpoint: str, messages: list[list[bytes]], seconds=0.5) -> list[bytes] | None:
    """Over a connection of its own; the last answer, if any comes."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 10_000)  # what is not on its way yet shall come, too
        dealer.connect(f"tcp://{endpoint}")
        for frames in messages:
            dealer.send_multipart(frames)
        return dealer.recv_multipart() if dealer.poll(1000 * seconds) else None
    finally:
        dealer.close()
        context.term()


def _expect_service(producer, consumer) -> None:
    """A hand-off works on the link that was there all the time."""
    key = make_key(f"after-{time.monotonic_ns()}")
    consumer.open(key, producer.incarnation)
    producer.hand_over(key, 12, [0, 1, 2], consumer.incarnation)
    consumer.load(key, [5, 6, 7])
    consumer.until(lambda: consumer.holds(key.request, 12, [5, 6, 7]))
    assert producer.service.problem() is None
    assert producer.metric("tandem:kv_links_lost_total", role="producer") == 0


def test_garbage_on_the_control_port_is_counted_and_dropped(pair):
    """Random frames, wrong numbers of frames, truncated headers, messages for the other end."""
    producer, consumer = pair
    rng = random.Random(7)
    header = HandLink(new_incarnation(), producer.incarnation).seal()
    truncated = encode(Open(make_key("a"), 5))[:-3]
    other_way = encode(Welcome(ProducerCard("tcp", b"", 1, 1, 1)))
    messages = [[rng.randbytes(n), rng.randbytes(3 * n)] for n in range(1, 60)]
    messages += [[b""], [b"", b"", b""], [rng.randbytes(9)] * 5]
    messages += [[header, b""], [header, truncated], [header, other_way], [header[:-1], b"x"]]
    messages += [[rng.randbytes(HEADER_BYTES), encode(Open(make_key("a"), 5))]]
    _send(producer.service.control, messages)
    counted = "tandem:kv_garbage_frames_total"
    producer.until(lambda: producer.metric(counted, port="control") >= len(messages))
    _expect_service(producer, consumer)


def test_oversized_and_raw_bytes_on_the_control_port_end_their_own_connection_only(pair):
    """ZMQ closes what is too large or is not ZMTP; links of others do not notice."""
    producer, consumer = pair
    _send(producer.service.control, [[b"x" * (MAX_MESSAGE_BYTES + 1), b"y"]])
    host, port = producer.service.control.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as raw:
        raw.sendall(os.urandom(10_000))
    _expect_service(producer, consumer)


def test_frames_without_a_session_are_answered_reset(pair):
    """Who speaks before HELLO, or to a predecessor, is told so."""
    producer, consumer = pair
    link = HandLink(new_incarnation(), producer.incarnation)
    link.seal()
    wild = [[link.seal(), encode(Open(make_key("a"), 5))]]
    answer = _send(producer.service.control, wild, seconds=SECONDS)
    assert answer is not None
    assert b"reset" in answer[1]
    _expect_service(producer, consumer)


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_garbage_on_the_data_port_ends_its_own_connection_only(pair):
    """Random bytes, a wrong secret, slots and sizes that do not exist: closed and counted."""
    producer, consumer = pair
    mover = producer.service._mover
    card = decode_card(mover._cards["tcp"])
    right = GREETING.pack(MAGIC, card.incarnation, card.secret)
    wrong = GREETING.pack(MAGIC, card.incarnation, bytes(16))
    slot_bytes = mover.memory.slot_bytes
    bad = [
        os.urandom(1000),
        wrong,
        right + REQUEST.pack(slot_bytes - 5, 10, 1),
        right + REQUEST.pack(1 << 60, 10, 1),
        right + REQUEST.pack(0, slot_bytes + 1, 1),
        right + REQUEST.pack(0, 0, 1),
    ]
    for data in bad:
        with socket.create_connection(("127.0.0.1", card.port), timeout=5) as raw:
            raw.sendall(data)
            assert raw.recv(1000) == b""
    with socket.create_connection(("127.0.0.1", card.port), timeout=5) as raw:
        raw.sendall(right[:-1])
    counted = "tandem:kv_garbage_frames_total"
    assert producer.metric(counted, port="data") == len(bad)
    _expect_service(producer, consumer)


def test_a_second_worker_on_the_same_port_says_so(workers):
    """A port in use is an error with its name, not a silent other port."""
    first = workers(Producer)
    port = int(first.service.control.rpartition(":")[2])
    with pytest.raises(AddressInUse, match=str(port)):
        Producer(make_config(kv_control_port=port))
