"""Messages and headers: what was written is read back, and nothing else is read."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.kvtransfer.handoff import messages as m
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.manifest import Item
from tandem.kvtransfer.memory.packing import (
    DIGEST_AT,
    HEADER_BYTES,
    Header,
    header_bytes,
    key_digest,
    read_header,
)
from tandem.protocol.card import KVKind
from tandem.protocol.errors import WireError
from tandem.protocol.ids import Incarnation, RequestKey
from tandem.protocol.kv import MAX_FIRST_BYTES, FirstToken, first_bytes
from tandem.protocol.messages import Beat, Hello, Reset, Welcome, encode
from tandem.protocol.outputs import TokenLogprobs

_COUNT = st.integers(0, 1 << 40)
_KEY = st.builds(
    RequestKey, st.binary(min_size=16, max_size=16), st.text(max_size=20), st.integers(0, 9)
)
_LOGPROBS = st.builds(
    TokenLogprobs, st.integers(0, 1 << 30), st.floats(-100, 0), st.integers(1, 1000)
)
_FIRST = st.tuples(
    st.builds(FirstToken, st.integers(0, 127), st.integers(0, 1 << 30), st.none() | _LOGPROBS)
)
_ITEM = st.builds(Item, st.integers(0, 15), st.sampled_from(KVKind), _COUNT, _COUNT)
_TO_P = st.one_of(
    st.builds(
        Hello,
        st.integers(0, 99),
        st.text(max_size=64),
        st.just(("nixl", "tcp")),
        st.binary(max_size=16),
    ),
    st.builds(m.Probe, _COUNT),
    st.builds(m.ProbeDone, _COUNT, st.booleans()),
    st.builds(m.Open, _KEY, st.none() | _COUNT),
    st.builds(
        m.Want,
        _KEY,
        _COUNT,
        st.integers(1, 1 << 16),
        st.tuples(st.integers(1, 1 << 24)),
        st.integers(1, 1 << 24),
        st.sampled_from(WireDtype),
    ),
    st.builds(m.Taken, _KEY, _COUNT),
    st.builds(m.Done, _KEY, st.booleans()),
    st.builds(Beat, _COUNT, _COUNT, st.booleans()),
    st.builds(Reset, st.text(max_size=500)),
)
_CARD = st.builds(
    m.ProducerCard,
    st.just("tcp"),
    st.binary(max_size=99),
    _COUNT,
    st.just(8),
    _COUNT,
    st.just(9),
    st.just(("x",)),
    st.integers(0, 1 << 24),
    st.integers(0, 7),
    st.integers(1, 8),
    st.sampled_from(WireDtype),
)
_TO_D = st.one_of(
    st.builds(Welcome, _CARD),
    st.builds(m.ProbeReady, _COUNT, _COUNT),
    st.builds(
        m.Ready,
        _KEY,
        _COUNT,
        _COUNT,
        st.tuples(_ITEM),
        st.lists(st.lists(st.integers(0, 1 << 24), max_size=9).map(tuple), max_size=16).map(tuple),
    ),
    st.builds(
        m.Part,
        _KEY,
        _COUNT,
        _COUNT,
        _COUNT,
        st.integers(0, 1 << 24),
        _COUNT,
        st.integers(0, 15),
    ),
    st.builds(m.Final, _KEY, _FIRST, st.none() | st.just("stop")),
    st.builds(m.Committed, _KEY),
    st.builds(m.Gone, _KEY, st.sampled_from(m.GoneReason)),
)


@given(_TO_P)
def test_what_a_consumer_says_is_read_back(message):
    assert m.decode_to_producer(encode(message)) == message


@given(_TO_D)
def test_what_a_producer_says_is_read_back(message):
    assert m.decode_to_consumer(encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_wire_error_or_a_message(data):
    """Nothing else can come of bytes."""
    for decode in (m.decode_to_producer, m.decode_to_consumer):
        try:
            message = decode(data)
        except WireError:
            continue
        assert decode(encode(message)) == message


@given(_TO_P, st.integers(0, 10_000))
def test_truncated_messages_are_wire_errors(message, cut):
    """No prefix of a message is one."""
    data = encode(message)
    with pytest.raises(WireError):
        m.decode_to_producer(data[: cut % len(data)])


def test_oversized_messages_are_dropped_unread():
    """The bound holds before anything is decoded."""
    with pytest.raises(WireError, match="at most"):
        m.decode_to_producer(bytes(m.MAX_MESSAGE_BYTES + 1))


def test_numbers_out_of_range_are_wire_errors():
    """Negative counts and missing credits are no messages."""
    key = RequestKey(b"R" * 16, "a", 0)
    for message in (
        m.Taken(key, -1),
        m.Want(key, 0, 0, (1,), 4),
        m.Want(key, 0, 1, (0,), 4),
        m.Want(key, 0, 1, (1,), 0),
        Hello(1, "f" * 65),
    ):
        with pytest.raises(WireError):
            m.decode_to_producer(encode(message))


def test_keys_are_bounded():
    """What has ended is remembered: nobody's names may be as long as a message."""
    for key in (
        RequestKey(b"R" * 17, "a", 0),
        RequestKey(b"R" * 16, "a" * 257, 0),
        RequestKey(b"R" * 16, "a", -1),
    ):
        with pytest.raises(WireError):
            m.decode_to_producer(encode(m.Open(key, 5)))


_U64 = st.integers(0, 2**64 - 1)
_ID = st.binary(min_size=16, max_size=16)
_HEADER = st.builds(Header, _ID, _ID, _ID.map(Incarnation), *[_U64] * 6)


@given(_HEADER)
def test_a_slot_header_is_read_back(header):
    slot = header_bytes(header)
    assert len(slot) == HEADER_BYTES
    assert read_header(memoryview(slot)) == header
    assert header.differs(header) is None


@given(_HEADER, st.integers(0, 115), st.integers(1, 255))
def test_a_changed_byte_of_a_headers_fields_is_seen(header, at, by):
    """They have a check sum of their own."""
    slot = bytearray(header_bytes(header))
    slot[at] ^= by
    with pytest.raises(WireError):
        read_header(memoryview(slot))


@given(_HEADER, st.integers(DIGEST_AT, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_digest_makes_it_another(header, at, by):
    """Which no payload has but by accident: it stands apart, where a GPU writes it."""
    slot = bytearray(header_bytes(header))
    slot[at] ^= by
    changed = read_header(bytes(slot))
    assert changed.digest != header.digest
    assert changed._replace(digest=header.digest) == header


def test_a_header_without_magic_or_too_short_is_a_wire_error():
    """An empty slot has no header."""
    for data in (bytes(HEADER_BYTES), b"", struct.pack("<8s", b"TDMSLOT1")):
        with pytest.raises(WireError):
            read_header(data)


def test_keys_that_look_alike_have_other_digests():
    """Fields do not run into each other."""
    one = RequestKey(b"R" * 16, "a1", 0)
    other = RequestKey(b"R" * 16, "a", 10)
    assert key_digest(one) != key_digest(other)


@pytest.mark.parametrize(("n", "logprobs"), [(1, 32_000), (128, 254)])
def test_first_tokens_that_may_be_handed_over_fit_a_message(n, logprobs):
    """Ids and floats are as long as they get, and the rest of FINAL as well."""
    assert 0.9 * MAX_FIRST_BYTES < first_bytes(n, logprobs) <= MAX_FIRST_BYTES
    ids = (1 << 30,) * logprobs
    beside = TokenLogprobs(1 << 30, -1 / 3, 1 << 30, ids, (-1 / 3,) * logprobs)
    first = tuple(FirstToken(each, 1 << 30, beside) for each in range(n))
    final = m.Final(RequestKey(bytes(16), "r" * 200, 1 << 20), first, "f" * 32)
    assert len(encode(final)) < m.MAX_MESSAGE_BYTES
