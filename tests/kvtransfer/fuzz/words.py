"""What peers of the fuzzing say: words of the hand-off with likely and unlikely numbers, and the
same words spoiled. Keys are names here; ``named`` makes them keys of one example."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tests.hand_link import HandLink

from tandem.kvtransfer.handoff import messages as m
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.handoff.manifest import Item
from tandem.protocol.card import KVKind
from tandem.protocol.errors import WireError
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.link import read_header, write_header
from tandem.protocol.messages import Beat, Hello, Reset, Welcome, encode

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Of each test; 0 is the short form, which is the same every time."""


def fuzzing(examples: int) -> settings:
    """So many in the short form; ``make fuzz-links`` has more, drawn anew."""
    return settings(
        max_examples=EXAMPLES or examples,
        deadline=None,
        derandomize=not EXAMPLES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


EDGES = (0, 1, 2, 4, 8, 12, 16, 63, 64, 1 << 16, 1 << 24, (1 << 24) + 1, 1 << 32, 1 << 40)
NUMBER = st.sampled_from(EDGES) | st.integers(0, 20)
NAMES = ("mine", "theirs", "nobody's")
KEY = st.sampled_from([RequestKey(b"R" * 16, name, 0) for name in NAMES])
_CONNECTORS = st.lists(st.sampled_from(["tcp", "shm", "nixl", "", "x" * 33]), max_size=4).map(tuple)

TO_PRODUCER = st.one_of(
    st.builds(m.Open, KEY, st.none() | NUMBER),
    st.builds(
        m.Want,
        KEY,
        NUMBER,
        NUMBER,
        st.lists(NUMBER, max_size=3).map(tuple),
        NUMBER,
        st.sampled_from(WireDtype),
    ),
    st.builds(m.Taken, KEY, NUMBER),
    st.builds(m.Done, KEY, st.booleans()),
    st.builds(m.Probe, NUMBER),
    st.builds(m.ProbeDone, NUMBER, st.booleans()),
    st.builds(Beat, NUMBER, NUMBER, st.booleans()),
    st.builds(Reset, st.text(max_size=9)),
    st.builds(Hello, NUMBER, st.text(max_size=9), _CONNECTORS, st.binary(max_size=16)),
)

_TEXT = st.text(max_size=9)
_ITEM = st.builds(Item, st.integers(0, 2), st.sampled_from(KVKind), NUMBER, NUMBER)
_RIGHT_ITEM = st.just(Item(0, KVKind.FULL, 0, 12))
_FIRST = st.builds(FirstToken, NUMBER, NUMBER)
_CARD = st.builds(
    m.ProducerCard,
    st.sampled_from(["tcp", "shm", "memory_blocks", "nixl", "", "nothing"]),
    st.binary(max_size=60),
    NUMBER,
    NUMBER,
    NUMBER,
    NUMBER,
    st.lists(st.sampled_from(["full_attention", "latent", ""]), max_size=3).map(tuple),
    st.sampled_from([0, 1, 2, 3, 4, 16]) | NUMBER,
    st.sampled_from([0, 1]) | NUMBER,
    st.sampled_from([1, 2]) | NUMBER,
    st.sampled_from(WireDtype),
)
_BLOCKS = st.lists(st.integers(0, 63) | NUMBER, max_size=5).map(tuple)

TO_CONSUMER = st.one_of(
    st.builds(m.ProbeReady, NUMBER, NUMBER),
    st.builds(
        m.Ready,
        KEY,
        NUMBER,
        NUMBER,
        st.lists(_RIGHT_ITEM | _ITEM, min_size=1, max_size=2).map(tuple),
        st.lists(_BLOCKS, max_size=2).map(tuple),
    ),
    st.builds(
        m.Part,
        KEY,
        st.integers(0, 3) | NUMBER,
        NUMBER,
        NUMBER,
        NUMBER,
        NUMBER,
        st.integers(0, 2),
    ),
    st.builds(m.Final, KEY, st.lists(_FIRST, max_size=3).map(tuple), st.none() | _TEXT),
    st.builds(m.Committed, KEY),
    st.builds(m.Gone, KEY, st.sampled_from(m.GoneReason)),
    st.builds(Beat, NUMBER, NUMBER, st.booleans()),
    st.builds(Reset, st.text(max_size=9)),
    st.builds(Welcome, _CARD),
)


class Spoil(Enum):
    CUT = "cut"
    FLIP = "flip"
    LONG = "long"
    FIELD = "field"
    NOISE = "noise"


class Head(Enum):
    AGAIN = "again"
    GAP = "gap"
    STALE = "for a predecessor"
    STRANGER = "of a stranger"
    CUT = "cut"
    NOISE = "noise"
    ALONE = "alone"
    THREE = "three parts"


ODD: list[Any] = [None, -1, 1 << 63, (1 << 64) - 1, 1.5, "", "x" * 600, b"", b"\0" * 17, [], {}]


@dataclass(frozen=True, slots=True)
class Word:
    message: Any
    spoil: Spoil | None = None
    head: Head | None = None
    at: int = 0
    value: Any = None

    def payload(self, keys: Mapping[str, RequestKey]) -> bytes:
        data = encode(named(self.message, keys))
        place = self.at % max(1, len(data))
        if self.spoil is Spoil.CUT:
            return data[:place]
        if self.spoil is Spoil.FLIP:
            return data[:place] + bytes([data[place] ^ (1 + self.at % 255)]) + data[place + 1 :]
        if self.spoil is Spoil.LONG:
            return data + data[: 1 + place]
        if self.spoil is Spoil.NOISE:
            return bytes((self.at * each) % 251 for each in range(1, 2 + self.at % 80))
        if self.spoil is Spoil.FIELD:
            fields = msgspec.msgpack.decode(data)
            fields[sorted(fields)[self.at % len(fields)]] = self.value
            return msgspec.msgpack.encode(fields)
        return data

    def parts(self, link: HandLink, keys: Mapping[str, RequestKey]) -> list[bytes]:
        """What goes to the socket, numbered by ``link``."""
        payload = self.payload(keys)
        if self.head is Head.AGAIN:
            return [write_header(link.me, link.peer, max(0, link._sent - 1)), payload]
        if self.head is Head.GAP:
            return [write_header(link.me, link.peer, link._sent + 1 + self.at % 7), payload]
        if self.head is Head.STALE:
            return [write_header(link.me, new_incarnation(), link._sent), payload]
        if self.head is Head.STRANGER:
            return [write_header(new_incarnation(), link.peer, self.at % 3), payload]
        if self.head is Head.CUT:
            return [link.seal()[: self.at % 44], payload]
        if self.head is Head.NOISE:
            return [payload[:44].ljust(44, b"\xff"), payload]
        if self.head is Head.ALONE:
            return [payload]
        if self.head is Head.THREE:
            return [link.seal(), payload, payload]
        return [link.seal(), payload]


def named(message: Any, keys: Mapping[str, RequestKey]) -> Any:
    """The message under the key that its key's name stands for."""
    key = getattr(message, "key", None)
    return message if key is None else msgspec.structs.replace(message, key=keys[key.request])


def is_garbage(parts: list[bytes], decode: Any) -> bool:
    """Whether these are no frame, by the rules of the wire alone."""
    try:
        if len(parts) != 2:
            return True
        read_header(parts[0])
        decode(parts[1])
    except WireError:
        return True
    return False


def words(of: st.SearchStrategy[Any], *, heads: bool = True) -> st.SearchStrategy[list[Word]]:
    """A few frames, of which most are as the protocol has them."""
    odd = st.none() | st.none() | st.sampled_from(Spoil)
    head = st.none() | st.none() | st.none() | (st.sampled_from(Head) if heads else st.none())
    one = st.builds(Word, of, odd, head, st.integers(0, 300), st.sampled_from(ODD))
    return st.lists(one, min_size=1, max_size=12)
