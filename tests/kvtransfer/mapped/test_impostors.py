"""Another process of this user at a producer's place in the folder, or between both ends: it learns
no secret, is given no memory, and its own memory is not taken."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.kvtransfer.descriptors import of_memory
from tests.kvtransfer.fuzz.test_fuzz_descriptors import descriptors
from tests.kvtransfer.mapped import hand
from tests.kvtransfer.mapped.test_mapped import block, ended, until
from tests.kvtransfer.mapped.worker import BLOCKS, BYTES, Worker
from tests.waiting import wait_for

from tandem.kvtransfer.errors import NoSocketYet, TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES
from tandem.kvtransfer.transports.base import Progress
from tandem.kvtransfer.transports.mapped import taking
from tandem.kvtransfer.transports.mapped.files import name_of, receive, stream_of
from tandem.kvtransfer.transports.mapped.wire import (
    ANSWER,
    CHALLENGE,
    MAGIC,
    MAPPING,
    PROOF,
    SIZES,
    Greeting,
    MappedCard,
    decode_card,
    encode_card,
    key_for,
)
from tandem.memory.shared import SharedMemory

_SIZES = (BLOCKS * BYTES, 2 * BYTES, BLOCKS * (TAG_BYTES + TURN_BYTES))


def settled(producer: Worker) -> None:
    """Wait until the producer looks for its socket seldom: it takes its place back."""
    server = producer.transport._server
    assert server is not None
    until(lambda: server._due > time.monotonic() + 1)


@contextmanager
def in_place_of(producer: Worker, folder: Path) -> Iterator[tuple[socket.socket, MappedCard, str]]:
    """A socket with the producer's name, the producer's card, and where its own socket is now."""
    encoded = producer.transport.serve(producer.slots, producer.blocks)
    card = decode_card(encoded)
    place, moved = folder / card.name, folder / "moved"
    settled(producer)
    place.rename(moved)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as taken:
        taken.bind(str(place))
        taken.listen(1)
        taken.settimeout(hand.SECONDS)
        yield taken, card, str(moved)


def answered(consumer: Worker, caller: socket.socket) -> tuple[bytes, list[int]]:
    consumer.transport.advance()
    caller.settimeout(hand.SECONDS)
    return receive(caller, 4 * ANSWER.size, 8)


def connected(consumer: Worker, producer: Worker, card: MappedCard) -> int:
    """A read of a consumer that has called whatever has the producer's name."""
    consumer.transport.connect(producer.incarnation, "127.0.0.1", encode_card(card))
    return consumer.transport.read(producer.incarnation, [block(0, 0)])


def memory(size: int, *, sealed: bool = True) -> int:
    """Memory whose pages are all there; sealed as what is given to be read."""
    made = SharedMemory.make(size)
    made.map()[:] = b"\x09" * size
    with closing(made):
        return made.share(writable=not sealed)


def give_own(mine: socket.socket) -> None:
    """Memory of this process, as a producer gives it."""
    own = [memory(size) for size in _SIZES]
    socket.send_fds(mine, [SIZES.pack(MAGIC, *_SIZES)], own)
    for each in own:
        os.close(each)


def test_an_impostor_learns_no_secret_and_gives_nothing(
    consumer: Worker, producer: Worker, folder: Path
) -> None:
    """It has all that the consumer sends, and guesses; the read fails and writes nothing."""
    with in_place_of(producer, folder) as (taken, card, _):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        with caller:
            hand.challenge_to(caller)
            said, files = answered(consumer, caller)
            assert card.secret not in said
            assert (len(said), len(files)) == (ANSWER.size, 1)
            mine, theirs = socket.socketpair()
            with stream_of(files[0]) as pair, mine, theirs:
                guess = PROOF.pack(MAGIC, os.urandom(32))
                socket.send_fds(pair, [guess], [theirs.fileno()])
                give_own(mine)
            assert ended(consumer.transport, read) is Progress.FAILED
    assert not consumer.kv_cache.any()


def test_a_producer_that_only_knows_another_secret_is_refused(
    consumer: Worker, producer: Worker, folder: Path
) -> None:
    """A worker of another service follows the whole protocol with the secret that it has."""
    with in_place_of(producer, folder) as (taken, card, _):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        own = [memory(size) for size in _SIZES]
        before = of_memory()
        with caller:
            hand.challenge_to(caller)
            consumer.transport.advance()
            said = SIZES.pack(MAGIC, *_SIZES)
            me = consumer.incarnation
            hand.give(caller, card, me, said, own, secret=b"x" * 32)
            assert ended(consumer.transport, read) is Progress.FAILED
        assert of_memory() <= before  # others of this process may end meanwhile
        for each in own:
            os.close(each)
    assert not consumer.kv_cache.any()


@pytest.mark.parametrize("reflected", ["the consumer's proof", "an earlier proof"])
def test_a_proof_serves_once_and_in_one_direction(
    consumer: Worker, producer: Worker, folder: Path, reflected: str
) -> None:
    """The consumer's own proof does not answer it, nor does a producer's proof of another call."""
    with in_place_of(producer, folder) as (taken, card, moved):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        with caller:
            hand.challenge_to(caller)
            said, files = answered(consumer, caller)
            mine, theirs = socket.socketpair()
            with stream_of(files[0]) as pair, mine, theirs:
                proof = ANSWER.unpack(said)[3]
                if reflected == "an earlier proof":
                    proof = _proof_of_another_call(moved, card)
                socket.send_fds(pair, [PROOF.pack(MAGIC, proof)], [theirs.fileno()])
                give_own(mine)
            assert ended(consumer.transport, read) is Progress.FAILED


def _proof_of_another_call(path: str, card: MappedCard) -> bytes:
    caller, challenge = hand.called(path)
    mine, theirs = socket.socketpair()
    with caller, mine:
        with theirs:
            socket.send_fds(caller, [hand.answer(card, challenge, theirs)], [theirs.fileno()])
        mine.settimeout(hand.SECONDS)
        data, files = receive(mine, PROOF.size, 1)
    for each in files:
        os.close(each)
    proof: bytes = PROOF.unpack(data)[1]
    return proof


def test_an_answer_that_was_heard_is_refused_when_it_is_sent_again(
    producer: Worker, folder: Path
) -> None:
    """Each call has a challenge of its own; so has an answer of a call that is still open."""
    card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
    path = str(folder / card.name)
    first, challenge = hand.called(path)
    second, other = hand.called(path)
    assert challenge != other
    mine, theirs = socket.socketpair()
    with first, second, mine:
        with theirs:
            heard = hand.answer(card, challenge, theirs)
            socket.send_fds(second, [heard], [theirs.fileno()])
        assert hand.taken(mine) == (b"", [])
    until(lambda: producer.garbage == 1)


@pytest.mark.parametrize("swaps", [True, False], ids=["its own socket", "the consumer's socket"])
def test_a_process_between_both_ends_is_given_nothing(
    consumer: Worker, producer: Worker, folder: Path, swaps: bool
) -> None:
    """It passes on each message as it comes. With a socket of its own the producer gives nothing;
    with the consumer's, all goes to the consumer, and nothing to it."""
    with in_place_of(producer, folder) as (taken, card, moved):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        onward, challenge = hand.called(moved)
        own, passed = socket.socketpair()
        with caller, onward, own, passed:
            caller.sendall(CHALLENGE.pack(MAGIC, challenge))
            said, files = answered(consumer, caller)
            with stream_of(files[0]) as theirs:
                socket.send_fds(onward, [said], [(passed if swaps else theirs).fileno()])
                onward.settimeout(hand.SECONDS)
                assert onward.recv(1) == b"", "the producer is through with the call"
                for each in (own, theirs):
                    each.setblocking(False)
                    with pytest.raises(BlockingIOError):
                        receive(each, 100, 8)
        how = ended(consumer.transport, read)
    assert how is (Progress.FAILED if swaps else Progress.DONE)
    assert producer.garbage == swaps
    assert consumer.kv_cache[0].tolist() == [0 if swaps else 7] * BYTES


def test_memory_of_a_process_between_both_ends_is_not_taken(
    consumer: Worker, producer: Worker, folder: Path
) -> None:
    """It has the consumer's socket, and is quicker there than the producer: its word is not
    proved."""
    with in_place_of(producer, folder) as (taken, card, moved):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        onward, challenge = hand.called(moved)
        with caller, onward:
            caller.sendall(CHALLENGE.pack(MAGIC, challenge))
            said, files = answered(consumer, caller)
            mine, theirs = socket.socketpair()
            with stream_of(files[0]) as pair, mine, theirs:
                socket.send_fds(pair, [PROOF.pack(MAGIC, bytes(32))], [theirs.fileno()])
                give_own(mine)
                socket.send_fds(onward, [said], [pair.fileno()])
            assert ended(consumer.transport, read) is Progress.FAILED
    assert not consumer.kv_cache.any()


def _odd(kind: str) -> tuple[list[int], tuple[int, int, int]]:
    """Descriptors that a producer gives, and what it says of their sizes."""
    kv_cache, slots, tags = _SIZES
    if kind == "one page less than was said":
        return [memory(kv_cache - BYTES), memory(slots), memory(tags)], _SIZES
    if kind == "one page more than was said":
        return [memory(kv_cache + BYTES), memory(slots), memory(tags)], _SIZES
    if kind == "unsealed":
        return [memory(kv_cache, sealed=False), memory(slots), memory(tags)], _SIZES
    if kind == "unsealed tags":
        return [memory(kv_cache), memory(slots), memory(tags, sealed=False)], _SIZES
    if kind == "a file":
        file = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
        os.ftruncate(file, kv_cache)
        return [file, memory(slots), memory(tags)], _SIZES
    if kind == "a device":
        return [os.open("/dev/zero", os.O_RDWR), memory(slots), memory(tags)], _SIZES
    count = {"two": 2, "four": 4, "many": 60}[kind]
    return [memory(size) for size in (_SIZES * count)[:count]], _SIZES


KINDS = (
    *("one page less than was said", "one page more than was said", "unsealed", "unsealed tags"),
    *("a file", "a device", "two", "four", "many"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_only_three_sealed_memories_of_the_said_sizes_are_taken(
    consumer: Worker, producer: Worker, folder: Path, kind: str
) -> None:
    """Also from a producer that has the secret; and no descriptor of others is kept."""
    with in_place_of(producer, folder) as (taken, card, _):
        before = descriptors()
        files, sizes = _odd(kind)
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        with caller:
            hand.challenge_to(caller)
            consumer.transport.advance()
            said = SIZES.pack(MAGIC, *sizes)
            hand.give(caller, card, consumer.incarnation, said, files)
            for each in files:
                os.close(each)
            assert ended(consumer.transport, read) is Progress.FAILED
        wait_for(lambda: descriptors() <= before, seen=lambda: descriptors() - before)
    assert not consumer.kv_cache.any()


def test_a_link_or_a_file_in_a_sockets_place_is_not_called(
    consumer: Worker, producer: Worker, folder: Path
) -> None:
    """A link may lead out of the folder; neither is worth another try."""
    card = decode_card(producer.transport.serve(producer.slots, producer.blocks))
    settled(producer)
    (folder / card.name).rename(folder / "moved")
    for make in (lambda at: at.symlink_to(folder / "moved"), Path.touch):
        make(folder / card.name)
        with pytest.raises(TransportError, match="is not a socket") as caught:
            connected(consumer, producer, card)
        assert not isinstance(caught.value, NoSocketYet)
        (folder / card.name).unlink()


def test_a_call_that_is_not_answered_ends(
    consumer: Worker, producer: Worker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of the greeting, whatever becomes of the link."""
    monkeypatch.setattr(taking, "GREETING_SECONDS", 0.05)
    with in_place_of(producer, folder) as (taken, card, _):
        for challenged in (False, True):
            read = connected(consumer, producer, card)
            caller, _ = taken.accept()
            with caller:
                if challenged:
                    hand.challenge_to(caller)
                assert ended(consumer.transport, read) is Progress.FAILED


def test_an_older_greeting_is_named(
    consumer: Worker, producer: Worker, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says which versions met."""
    with in_place_of(producer, folder) as (taken, card, _):
        read = connected(consumer, producer, card)
        caller, _ = taken.accept()
        with caller:
            caller.sendall(CHALLENGE.pack(b"TDMFDS01", bytes(32)))
            assert ended(consumer.transport, read) is Progress.FAILED
    assert "TDMFDS01" in caplog.text
    assert "allowed: b'TDMFDS02'" in caplog.text


def test_both_proofs_cover_every_part() -> None:
    """With one part changed, or one role for the other, the proof is another one."""
    key = key_for(b"s" * 32, MAPPING)
    whole = Greeting(b"a.sock", b"p" * 16, b"c" * 16, b"1" * 32, b"2" * 32)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        names = name_of(mine), name_of(theirs)
    proofs = {whole.producers(key, *names), whole.consumers(key, names[0])}
    proofs |= {whole.producers(key, *names[::-1]), whole.consumers(key, names[1])}
    for field in whole._fields:
        changed = whole._replace(**{field: b"x" + getattr(whole, field)[1:]})
        proofs |= {changed.producers(key, *names), changed.consumers(key, names[0])}
    other = key_for(b"s" * 32, b"another purpose")
    proofs |= {whole.producers(other, *names), whole.consumers(other, names[0])}
    assert len(proofs) == 4 + 2 * len(whole._fields) + 2
