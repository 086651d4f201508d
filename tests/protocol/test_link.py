"""Frames for another incarnation or with a gap never reach anybody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.errors import WireError
from tandem.protocol.ids import new_incarnation
from tandem.protocol.link import HEADER_BYTES, Link, Verdict, read_header


def pair() -> tuple[Link, Link]:
    """Two ends that greeted each other."""
    left, right = Link(new_incarnation()), Link(new_incarnation())
    assert right.accept(read_header(left.seal())) is Verdict.NEW_PEER
    assert left.accept(read_header(right.seal())) is Verdict.NEW_PEER
    return left, right


def test_frames_in_order_are_delivered() -> None:
    """Both directions count on their own."""
    left, right = pair()

    for _ in range(3):
        assert right.accept(read_header(left.seal())) is Verdict.DELIVER
    assert left.accept(read_header(right.seal())) is Verdict.DELIVER


def test_a_lost_frame_breaks_the_link() -> None:
    """A gap is noticed at the next frame."""
    left, right = pair()
    left.seal()

    assert right.accept(read_header(left.seal())) is Verdict.RESET


def test_a_repeated_frame_breaks_the_link() -> None:
    """A duplicate is not delivered twice."""
    left, right = pair()
    header = read_header(left.seal())

    assert right.accept(header) is Verdict.DELIVER
    assert right.accept(header) is Verdict.RESET


def test_a_successor_does_not_take_its_predecessors_frames() -> None:
    """Frames for a process that is gone are refused by whatever listens there now."""
    left, _ = pair()
    successor = Link(new_incarnation())

    assert successor.accept(read_header(left.seal())) is Verdict.RESET


def test_a_new_peer_starts_at_zero() -> None:
    """A restarted peer is another peer, and its first frame counts from 0."""
    _, right = pair()
    restarted = Link(new_incarnation())

    assert right.accept(read_header(restarted.seal())) is Verdict.NEW_PEER


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_a_wire_error(data: bytes) -> None:
    """Random bytes are never taken for a header."""
    with pytest.raises(WireError):
        read_header(data)
