"""Workers of one machine that map each other's memory: who gets it, what may be copied, and when it
is let go of."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.kvtransfer.mapped import hand
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, KEY, TAG, Worker
from tests.waiting import wait_for

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import CLEARED
from tandem.kvtransfer.transports.base import Check, Extent, Place, Progress, Region, Transport
from tandem.kvtransfer.transports.mapped import giving
from tandem.kvtransfer.transports.mapped.copiers import HostCopier
from tandem.kvtransfer.transports.mapped.wire import ANSWER, MAGIC, SIZES, decode_card
from tandem.protocol.ids import Incarnation


def until(told: Callable[[], object]) -> None:
    wait_for(told, every=0.005)


def block(mine: int, theirs: int, *, shift: int = 0, nbytes: int = BYTES) -> Extent:
    here, there = Place(Region.BLOCKS, mine * BYTES), Place(Region.BLOCKS, theirs * BYTES + shift)
    return Extent(here, there, nbytes, Check.TAG)


def ended(transport: Transport, ticket: Any) -> Progress:
    seen: list[Progress] = []

    def over() -> bool:
        transport.advance()
        seen.append(transport.poll(ticket))
        return seen[-1] is not Progress.PENDING

    until(over)
    return seen[-1]


def counted(worker: Worker, number: int) -> bool:
    return worker.garbage == number


def moved(consumer: Worker) -> bool:
    """True, and the transport has got on."""
    consumer.transport.advance()
    return True


def linked(consumer: Worker, producer: Worker) -> Incarnation:
    card = producer.transport.serve(producer.slots, producer.blocks)
    consumer.transport.connect(producer.incarnation, "127.0.0.1", card)
    return producer.incarnation


def mappings() -> int:
    """Ranges of shared memory that this process has mapped."""
    gc.collect()  # what earlier tests left is not to go in the middle of one
    return Path("/proc/self/maps").read_text().count("memfd:tandem-kv")


def test_blocks_are_copied_with_their_tags(consumer: Worker, producer: Worker) -> None:
    """Scattered blocks come in one read, and each one's tag as it is after the copy."""
    peer = linked(consumer, producer)
    producer.kv_cache[3:6] = torch.arange(3, dtype=torch.uint8)[:, None] + 1
    producer.blocks.tags.set(KEY, 4, TAG)
    read = consumer.transport.read(peer, [block(0, 5), block(7, 4)])
    assert ended(consumer.transport, read) is Progress.DONE
    assert consumer.transport.tags_of(read) == bytes(16) + TAG
    assert consumer.kv_cache[:, 0].tolist() == [3, 0, 0, 0, 0, 0, 0, 2]
    assert not consumer.transport.tags_of(read)


@pytest.mark.parametrize(
    "extent",
    [
        block(0, BLOCKS),
        block(0, 0, nbytes=BLOCKS * BYTES + 1),
        block(0, -1),
        block(0, 1, shift=1),
        block(BLOCKS, 0),
        block(-1, 0),
        Extent(Place(Region.SLOTS, 0), Place(Region.SLOTS, 2 * BYTES), 1, Check.PATTERN),
        Extent(Place(Region.SLOTS, 2 * BYTES), Place(Region.SLOTS, 0), 1, Check.PATTERN),
    ],
)
def test_what_lies_outside_is_not_touched(
    consumer: Worker, producer: Worker, extent: Extent
) -> None:
    """An extent beyond either end's memory, or that is no whole block, fails its read and writes
    nothing; the link goes on."""
    peer = linked(consumer, producer)
    read = consumer.transport.read(peer, [block(1, 1), extent])
    assert ended(consumer.transport, read) is Progress.FAILED
    assert not consumer.kv_cache.any()
    assert not consumer.slots.rows.any()
    assert ended(consumer.transport, consumer.transport.read(peer, [block(0, 0)])) is Progress.DONE


def test_a_lost_peers_memory_is_let_go_of(consumer: Worker, producer: Worker) -> None:
    """Slab, slots and tags of a peer are mapped once, and not longer than its link."""
    before = mappings()
    peer = linked(consumer, producer)
    for _ in range(3):
        ended(consumer.transport, consumer.transport.read(peer, [block(0, 0)]))
    assert mappings() == before + 3
    consumer.transport.close(peer)
    assert mappings() == before
    gone = consumer.transport.read(peer, [block(0, 0)])
    assert ended(consumer.transport, gone) is Progress.FAILED


class Slow:
    """Copies that end when they are told to."""

    due = 12.0

    def __init__(self, inner: HostCopier) -> None:
        self._inner = inner
        self.through = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mark(self) -> Slow:
        return self

    def done(self) -> bool:
        return self.through


def test_memory_stays_mapped_under_a_copy(consumer: Worker, producer: Worker) -> None:
    """A link that is lost in mid-copy: the read is not terminal before the copy is over, and the
    peer's memory is mapped as long."""
    slow = consumer.transport._copier = Slow(HostCopier())
    before = mappings()
    peer = linked(consumer, producer)
    read = consumer.transport.read(peer, [block(0, 0)])
    until(lambda: moved(consumer) and consumer.kv_cache[0].all())
    consumer.transport.close(peer)
    assert consumer.transport.poll(read) is Progress.PENDING
    assert (consumer.transport.moments(), consumer.transport.stirs()) == ([12.0], False)
    assert mappings() == before + 3
    slow.through = True
    assert consumer.transport.stirs()
    assert consumer.transport.poll(read) is Progress.DONE
    assert mappings() == before


def test_a_tag_that_went_and_came_back_during_the_copy_counts_as_cleared(
    consumer: Worker, producer: Worker
) -> None:
    """Between the two the block was somebody else's: the same tag says nothing of the bytes."""
    slow = consumer.transport._copier = Slow(HostCopier())
    producer.blocks.tags.set(KEY, 3, TAG)
    peer = linked(consumer, producer)
    read = consumer.transport.read(peer, [block(0, 3)])
    until(lambda: moved(consumer) and consumer.transport._reads[read].mark is not None)
    producer.blocks.tags.clear(KEY)
    producer.blocks.tags.set(KEY, 3, TAG)
    slow.through = True
    assert ended(consumer.transport, read) is Progress.DONE
    assert consumer.transport.tags_of(read) == CLEARED
    again = consumer.transport.read(peer, [block(0, 3)])
    assert ended(consumer.transport, again) is Progress.DONE
    assert consumer.transport.tags_of(again) == TAG


def test_a_copy_that_cannot_be_begun_ends_behind_those_before_it(
    consumer: Worker, producer: Worker
) -> None:
    """Of two copies the second is refused: the read fails, but not while the first may land."""

    class Refusing(Slow):
        copies = 0

        def copy(self, *args: Any) -> None:
            self.copies += 1
            if self.copies == 2:
                raise TransportError("refused")
            self._inner.copy(*args)

    refusing = consumer.transport._copier = Refusing(HostCopier())
    peer = linked(consumer, producer)
    place = Place(Region.SLOTS, 0)
    two = [block(0, 0), Extent(place, place, BYTES, Check.PATTERN)]
    read = consumer.transport.read(peer, two)
    until(lambda: moved(consumer) and refusing.copies == 2)
    assert consumer.transport.poll(read) is Progress.PENDING
    refusing.through = True
    assert consumer.transport.poll(read) is Progress.FAILED


def test_reads_before_the_memory_came_end_with_the_link(
    consumer: Worker, producer: Worker, folder: Path
) -> None:
    """A producer that hangs gives nothing: the reads wait, and fail when the link is given up."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(folder / "00.sock"))
        mute.listen(1)
        card = hand.encoded("00.sock")
        consumer.transport.connect(producer.incarnation, "127.0.0.1", card)
        read = consumer.transport.read(producer.incarnation, [block(0, 0)])
        consumer.transport.advance()
        assert consumer.transport.poll(read) is Progress.PENDING
        consumer.transport.close(producer.incarnation)
        assert consumer.transport.poll(read) is Progress.FAILED


def copies_of(descriptor: int) -> int:
    """How many of this process's descriptors are of the same open file: others come and go with the
    garbage of other tests."""
    file, count = os.fstat(descriptor), 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own is closed again
            found = os.fstat(int(name))
            count += (found.st_dev, found.st_ino) == (file.st_dev, file.st_ino)
    return count


@pytest.mark.parametrize(
    ("data", "descriptors"),
    [
        (b"", 0),
        (b"x" * SIZES.size, 3),
        (SIZES.pack(MAGIC, 1, 1, 1), 2),
        (SIZES.pack(MAGIC, 1, 0, 1), 3),
        (SIZES.pack(MAGIC, 1 << 60, 1 << 60, 1 << 60), 3),
    ],
)
def test_an_answer_that_is_none_fails_the_link(
    consumer: Worker, producer: Worker, folder: Path, data: bytes, descriptors: int
) -> None:
    """Too few descriptors, other sizes, other words: the reads fail and no descriptor is kept."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as odd, tempfile.TemporaryFile() as null:
        odd.bind(str(folder / "00.sock"))
        odd.listen(1)
        card = hand.card_of("00.sock")
        before = copies_of(null.fileno())
        consumer.transport.connect(producer.incarnation, "127.0.0.1", hand.encoded("00.sock"))
        read = consumer.transport.read(producer.incarnation, [block(0, 0)])
        caller, _ = odd.accept()
        with caller:
            hand.challenge_to(caller)
            consumer.transport.advance()
            files = [null.fileno()] * descriptors
            hand.give(caller, card, consumer.incarnation, data, files)
        assert ended(consumer.transport, read) is Progress.FAILED
        consumer.transport.close(producer.incarnation)
        assert copies_of(null.fileno()) == before
    assert not consumer.kv_cache.any()


def test_who_greets_wrongly_is_given_nothing(
    producer: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage, another secret, another incarnation, too much and silence: counted, and closed."""
    monkeypatch.setattr(giving, "GREETING_SECONDS", 0.3)
    card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
    path = str(producer.transport._folder / card.name)
    other = [
        msgspec.structs.replace(card, secret=b"x" * 32),
        msgspec.structs.replace(card, incarnation=b"x" * 16),
        msgspec.structs.replace(card, name="00.sock"),
    ]
    web = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    wrong: list[Callable[[bytes, socket.socket], bytes]] = [
        lambda _challenge, _pair: web,
        *(partial(hand.answer, each) for each in other),
        lambda challenge, pair: hand.answer(card, challenge, pair) + b"x",
        lambda challenge, pair: hand.answer(card, challenge, pair)[:-1],
        lambda _challenge, _pair: b"TDMFDS01" + card.incarnation + card.secret,
        lambda challenge, pair: ANSWER.pack(
            MAGIC, *ANSWER.unpack(hand.answer(card, challenge, pair))[1:3], card.secret
        ),
    ]
    for number, made in enumerate(wrong, 1):
        caller, challenge = hand.called(path)
        mine, theirs = socket.socketpair()
        with caller, mine:
            with theirs:
                socket.send_fds(caller, [made(challenge, theirs)], [theirs.fileno()])
            assert hand.taken(mine) == (b"", [])
        until(partial(counted, producer, number))
    data, descriptors = hand.asked(path, card)
    for each in descriptors:
        os.close(each)
    assert (len(data), len(descriptors)) == (SIZES.size, 3)
