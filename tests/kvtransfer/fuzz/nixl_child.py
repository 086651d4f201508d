"""A consumer of NIXL that is given spoiled cards: ``python -m ...nixl_child SEED COUNT``.

In a process of its own: the library's parser is C++, and what ends it would end the tests. The last
line is what came of the cards, as JSON.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import msgspec
from tests.waiting import wait_for

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.slots import SlotMemory
from tandem.kvtransfer.mover.reads import slot_extent
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.nixl import NixlTransport, digest_of
from tandem.protocol.ids import Incarnation, new_incarnation

SLOT = 4096
NUMBERS = (b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7)


def spoiled(draw: random.Random, right: bytes) -> bytes:
    """The same with some bits, its length, or a number of 8 bytes changed."""
    data = bytearray(right)
    kind = draw.randrange(4)
    if kind == 0:
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[draw.randrange(len(data)) :]
    elif kind == 2:
        data += draw.randbytes(draw.randrange(1, 64))
    else:
        at = draw.randrange(len(data))
        data[at : at + 8] = draw.choice(NUMBERS)
    return bytes(data)


def main(seed: int, count: int) -> dict[str, int]:
    """Cards spoiled on their way, then those of peers that meant it, then the right one."""
    draw, told = random.Random(seed), Counter[str]()
    peer = new_incarnation()
    producer = NixlTransport(peer, "producer", loopback=True)
    consumer = NixlTransport(new_incarnation(), "consumer", loopback=True)
    theirs, mine = SlotMemory(2, SLOT), SlotMemory(2, SLOT)
    theirs.write(1, b"\7" * SLOT)
    card = producer.serve(theirs)
    consumer.receive(mine)
    for _ in range(count):
        told[_offered(consumer, peer, spoiled(draw, card))] += 1
    for number in range(count):
        liar = new_incarnation()
        other = NixlTransport(liar, "producer", loopback=True) if number % 50 == 0 else None
        fields = msgspec.msgpack.decode(other.serve(SlotMemory(1, SLOT)) if other else card)
        fields[0] = spoiled(draw, fields[0])
        fields[5] = digest_of(fields[0])
        told["liar: " + _offered(consumer, liar, msgspec.msgpack.encode(fields))] += 1
        if other is not None:
            other.stop()
    consumer.connect(peer, "", card)
    ticket = consumer.read(peer, [slot_extent(0, 1, SLOT, slot_bytes=SLOT, remote_slot_bytes=SLOT)])

    def ended() -> Progress | None:
        producer.advance()
        consumer.advance()
        progress = consumer.poll(ticket)
        return None if progress is Progress.PENDING else progress

    told["right"] = int(wait_for(ended, every=0.001) is Progress.DONE)
    told["right"] &= int(mine.read(0, SLOT) == b"\7" * SLOT)
    consumer.stop()
    producer.stop()
    return dict(told)


def _offered(consumer: NixlTransport, peer: Incarnation, card: bytes) -> str:
    """What comes of one card; whatever is not a TransportError ends the process."""
    try:
        consumer.connect(peer, "", card)
    except TransportError:
        return "refused"
    consumer.close(peer)
    return "taken"


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))), flush=True)
