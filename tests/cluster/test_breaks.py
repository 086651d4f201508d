"""What counts as broken by a node's death, and what as broken beside it."""

from __future__ import annotations

from tests.e2e_cluster.attempts import Attempt, Ends
from tests.e2e_cluster.breaks import Breaks
from tests.e2e_cluster.entry import parsed


def ends(port: int) -> Ends:
    """Of a connection to the service from one of our ports."""
    return ("10.89.0.1", port, "10.96.0.7", 8000)


DEAD, LIVING = "10.88.2.3", "10.88.1.3"
CUT = 10.0
WENT = {ends(1): DEAD, ends(2): LIVING, ends(3): DEAD, ends(4): LIVING}


def attempt(port: int | None, began: float, ended: float | None, problem: str = "") -> Attempt:
    """One that was connected and asked at once, if it has a port."""
    connected = None if port is None else began
    return Attempt(began, ends(port) if port else None, connected, connected, None, ended, problem)


def breaks(*attempts: Attempt) -> Breaks:
    """Around a cut at ``CUT``."""
    return Breaks.of(attempts, WENT, {DEAD}, cut=CUT)


def test_what_a_dead_router_had_begun_may_break():
    """By the address that a connection went to, not by when it broke."""
    found = breaks(attempt(1, 8, 17, "ReadError"), attempt(2, 8, 12), attempt(4, 11, None))
    assert [each.ends for each in found.begun] == [ends(1)]
    assert [each.ends for each in found.broken] == [ends(1)]
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


def test_another_clients_connection_of_the_same_port_is_another():
    """A kubelet's probe may have our port: whose connection went where is told by all four ends."""
    line = (
        "ipv4     2 tcp      6 86399 ESTABLISHED src={} dst={} sport=53366 dport={} "
        "src={} dst={} sport=8000 dport=53366 [ASSURED] mark=0 zone=0 use=2"
    )
    ours = line.format("10.89.0.1", "10.96.0.7", 8000, DEAD, "10.89.0.1")
    probe = line.format("10.89.1.1", LIVING, 8000, LIVING, "10.89.1.1")
    assert parsed([ours, probe])["10.89.0.1", 53366, "10.96.0.7", 8000] == DEAD
