"""Both ends of the greeting by hand, so that a test can leave out or change any step of it."""

from __future__ import annotations

import socket
from contextlib import suppress

from tandem.kvtransfer.transports.mapped.files import name_of, receive, stream_of
from tandem.kvtransfer.transports.mapped.wire import (
    ANSWER,
    CHALLENGE,
    MAGIC,
    MAPPING,
    PROOF,
    SIZES,
    VERSION,
    Greeting,
    MappedCard,
    encode_card,
    key_for,
)

SECONDS = 10.0
ME = b"c" * 16
FRESH = b"n" * 32
CHALLENGED = b"p" * 32


def card_of(name: str, secret: bytes = b"s" * 32, place: bytes = b"") -> MappedCard:
    """A card that a producer might have sent."""
    return MappedCard(VERSION, name, secret, b"i" * 16, place)


def encoded(name: str, secret: bytes = b"s" * 32, place: bytes = b"") -> bytes:
    return encode_card(card_of(name, secret, place))


def called(path: str) -> tuple[socket.socket, bytes]:
    """A connection to a producer, and its challenge; nothing if it gave none."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.settimeout(SECONDS)
    caller.connect(path)
    with suppress(ConnectionResetError):
        data = caller.recv(CHALLENGE.size)
        return caller, CHALLENGE.unpack(data)[1] if data else b""
    return caller, b""


def greeting(card: MappedCard, challenge: bytes) -> Greeting:
    return Greeting(card.name.encode(), card.incarnation, ME, challenge, FRESH)


def answer(card: MappedCard, challenge: bytes, pair: socket.socket) -> bytes:
    """The right answer of a consumer that sends ``pair``."""
    proof = greeting(card, challenge).consumers(key_for(card.secret, MAPPING), name_of(pair))
    return ANSWER.pack(MAGIC, ME, FRESH, proof)


def taken(pair: socket.socket) -> tuple[bytes, list[int]]:
    """What a producer gives to a consumer that holds the other end of ``pair``: sizes and
    descriptors, or nothing."""
    pair.settimeout(SECONDS)
    proof, files = receive(pair, PROOF.size, 1)
    if not proof:
        return b"", files
    with stream_of(files[0]) as given:
        given.settimeout(SECONDS)
        return receive(given, 2 * SIZES.size, 8)


def asked(path: str, card: MappedCard) -> tuple[bytes, list[int]]:
    """What a consumer is given that does all as it should."""
    caller, challenge = called(path)
    mine, theirs = socket.socketpair()
    with caller, mine:
        with theirs:
            socket.send_fds(caller, [answer(card, challenge, theirs)], [theirs.fileno()])
        return taken(mine)


def challenge_to(caller: socket.socket) -> None:
    caller.sendall(CHALLENGE.pack(MAGIC, CHALLENGED))


def give(
    caller: socket.socket,
    card: MappedCard,
    consumer: bytes,
    message: bytes,
    files: list[int],
    *,
    secret: bytes | None = None,
) -> None:
    """A producer's steps for the call of a real consumer that has sent its answer to CHALLENGED."""
    caller.settimeout(SECONDS)
    challenge = CHALLENGED
    data, found = receive(caller, ANSWER.size, 1)
    _, _, nonce, _ = ANSWER.unpack(data)
    key = key_for(card.secret if secret is None else secret, MAPPING)
    said = Greeting(card.name.encode(), card.incarnation, consumer, challenge, nonce)
    mine, theirs = socket.socketpair()
    with stream_of(found[0]) as pair, mine, theirs:
        proof = said.producers(key, name_of(pair), name_of(theirs))
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(pair, [PROOF.pack(MAGIC, proof)], [theirs.fileno()])
            if message:
                socket.send_fds(mine, [message], files)
