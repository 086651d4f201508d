"""What counts as broken by a node's death, and what as broken beside it."""

from __future__ import annotations

from tests.e2e_cluster.attempts import Attempt
from tests.e2e_cluster.breaks import Breaks

DEAD, LIVING = "10.88.2.3", "10.88.1.3"
CUT = 10.0
WENT = {1: DEAD, 2: LIVING, 3: DEAD, 4: LIVING}


def attempt(port: int | None, began: float, ended: float | None, problem: str = "") -> Attempt:
    """One that was connected and asked at once, if it has a port."""
    connected = None if port is None else began
    return Attempt(began, port, connected, connected, None, ended, problem)


def breaks(*attempts: Attempt) -> Breaks:
    """Around a cut at ``CUT``."""
    return Breaks.of(attempts, WENT, {DEAD}, cut=CUT)


def test_what_a_dead_router_had_begun_may_break():
    """By the address that a connection went to, not by when it broke."""
    found = breaks(attempt(1, 8, 17, "ReadError"), attempt(2, 8, 12), attempt(4, 11, None))
    assert [each.port for each in found.begun] == [1]
    assert [each.port for each in found.broken] == [1]
    assert found.elsewhere == []


def test_what_breaks_with_a_living_router_is_named():
    """Begun before the cut or after it."""
    before, after = attempt(2, 8, 17, "ReadError"), attempt(4, 11, 12, "503")
    assert breaks(before, after).elsewhere == [before, after]


def test_what_had_ended_before_the_cut_was_not_under_way():
    """A break of then has another cause, whoever the router was."""
    early = attempt(3, 5, 9, "ReadError")
    found = breaks(early)
    assert found.begun == []
    assert found.elsewhere == [early]


def test_attempts_that_do_not_connect_are_bounded_by_their_pace():
    """One under way for each stream, and one more in each period until the dead are forgotten."""
    missed, late = attempt(None, 11, 13, "ConnectTimeout"), attempt(None, 15, 17, "ConnectTimeout")
    found = breaks(missed, late)
    assert found.unconnected == [missed, late]
    assert found.broken == []
    assert found.most_unconnected(8, forgotten=14.0, every=2.0) == 8 * 3
    assert found.late(14.0) == [late]


def test_a_break_is_told_with_how_far_its_request_was():
    """The line of the output counts by cause."""
    half = attempt(1, 8, 17, "ReadError")
    half.answered = 9.5
    assert "1 broke {'answer begun': 1}" in str(breaks(half))
