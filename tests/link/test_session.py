"""Who gets a link, and which frames belong to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.link.liveness import LinkTimes
from tandem.link.session import LinkState, Session, Terms, Verdict
from tandem.link.sockets import decode_to_router
from tandem.protocol.errors import WireError
from tandem.protocol.ids import NO_INCARNATION, Incarnation, new_incarnation
from tandem.protocol.link import HEADER_BYTES, Header, read_header, write_header
from tandem.protocol.messages import Beat, Draining, Frame, Hello, Reset, Welcome, encode

TERMS = Terms(
    Incarnation(b"A" * 16), "protocol", 3, LinkTimes(), fingerprint="print", secret="word"
)


def other(**changes: object) -> Terms:
    return replace(TERMS, me=new_incarnation(), **changes)  # type: ignore[arg-type]


def answered(caller: Terms) -> str | None:
    session = Session(TERMS)
    header = read_header(Session(caller).greet(0.0))
    refusal = session.answer(header, caller.hello())
    assert (session.state is LinkState.UP) == (refusal is None)
    assert session.peer == caller.me
    return refusal


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"version": 4}, "protocol 4; here it is 3"),
        ({"secret": "another"}, "wrong secret"),
        ({"secret": None}, "wrong secret"),
        ({"fingerprint": "print2"}, "fingerprint print2; here it is print"),
    ],
)
def test_who_may_have_a_link(changes: dict[str, object], words: str | None) -> None:
    """Version, secret and fingerprint, in this order."""
    assert answered(other(**changes)) == words


def test_a_hello_of_another_process_has_no_use() -> None:
    """Its word is bound to who says it, and to whom."""
    thief, victim = other(), other()
    header = read_header(Session(thief).greet(0.0))
    assert Session(TERMS).answer(header, victim.hello()) == "wrong secret"
    elsewhere = Header(victim.me, new_incarnation(), 0)
    assert Session(TERMS).answer(elsewhere, victim.hello()) == "HELLO for another process"


def greeting() -> Session:
    session = Session(other())
    session.greet(0.0)
    return session


@pytest.mark.parametrize(
    ("source", "sequence", "message"),
    [
        (NO_INCARNATION, 0, Welcome("card")),
        (TERMS.me, 1, Welcome("card")),
        (TERMS.me, 0, Draining(1)),
        (TERMS.me, 0, Beat()),
        (TERMS.me, 0, Hello(3)),
    ],
)
def test_before_the_welcome_all_else_is_stray(
    source: object, sequence: int, message: object
) -> None:
    """It is of an earlier link over the same connection."""
    session = greeting()
    header = Header(source, session.me, sequence)  # type: ignore[arg-type]
    assert session.take(header, message, 1.0) is Verdict.STRAY
    assert session.state is LinkState.GREETING


def test_a_reset_instead_of_a_welcome_says_why() -> None:
    """One for somebody else says nothing."""
    session = greeting()
    assert session.take(Header(TERMS.me, new_incarnation(), 0), Reset("x"), 1.0) is Verdict.STRAY
    assert session.take(Header(TERMS.me, session.me, 5), Reset("x"), 1.0) is Verdict.REFUSED
    assert session.why == "x"


def up(**changes: object) -> Session:
    session = Session(other(**changes))
    session.greet(0.0)
    assert session.take(Header(TERMS.me, session.me, 0), Welcome("card"), 0.0) is Verdict.UP
    return session


def test_frames_that_do_not_follow_end_the_link() -> None:
    """A gap, a repeat, a frame for another process; another process's first frame."""
    for source, number, verdict in (
        (TERMS.me, 2, Verdict.BROKEN),
        (TERMS.me, 0, Verdict.BROKEN),
        (new_incarnation(), 1, Verdict.BROKEN),
        (new_incarnation(), 0, Verdict.LOST),
    ):
        session = up()
        assert session.take(Header(source, session.me, number), Draining(1), 0.0) is verdict
        assert session.state is LinkState.DOWN
    session = up()
    assert session.take(Header(TERMS.me, NO_INCARNATION, 1), Draining(1), 0.0) is Verdict.BROKEN


@pytest.mark.parametrize("forgiving", [True, False])
def test_a_payload_that_is_no_message(forgiving: bool) -> None:
    """Where one forgives it says nothing; else it is a lost frame, which the next one shows."""
    session = up(forgiving=forgiving)
    parts = [[write_header(TERMS.me, session.me, n), encode(Frame(step=n))] for n in (1, 2, 3)]
    parts[1][1] = b"\xc1"
    verdicts = [session.receive(each, decode_to_router, 0.0)[0] for each in parts]
    last = Verdict.DELIVER if forgiving else Verdict.BROKEN
    assert verdicts == [Verdict.DELIVER, Verdict.GARBAGE, last]


@given(st.lists(st.binary(max_size=2 * HEADER_BYTES), max_size=3))
def test_garbage_never_ends_a_link(parts: list[bytes]) -> None:
    """Random bytes are no frame of it."""
    session = up()
    verdict, message = session.receive(parts, decode_to_router, 0.0)
    assert (verdict, message) == (Verdict.GARBAGE, None)
    assert session.state is LinkState.UP


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_random_bytes_are_never_taken_for_a_header(data: bytes) -> None:
    """It has a length and a magic."""
    with pytest.raises(WireError):
        read_header(data)
