"""What D remembers of prefill workers that are down: those that it is to link with."""

from __future__ import annotations

from tandem.kvtransfer.control.client import MAX_REMEMBERED, PeerBook
from tandem.kvtransfer.handoff.actions import Millis
from tandem.protocol.ids import Incarnation, new_incarnation

OLD, NEW = Incarnation(b"o" * 16), Incarnation(b"n" * 16)


def _known(book: PeerBook) -> list[Incarnation]:
    return [each.peer for each in book.snapshot()]


def test_whom_nobody_names_is_forgotten_when_its_link_is_down():
    """Each rollout left its old workers as links that are down, in every view of the fleet, until
    the decode worker ended."""
    book = PeerBook()
    book.keep(frozenset([OLD]))
    book.mark(OLD, up=True)
    book.keep(frozenset([NEW]))
    book.mark(NEW, up=False, reason="the link is being probed")
    assert _known(book) == [OLD, NEW], "a link that stands is told, whoever names it"
    book.mark(OLD, up=False, reason="no longer a peer")
    assert _known(book) == [NEW]
    book.mark(OLD, up=True)
    assert book.is_up(OLD)


def test_a_peer_that_is_to_be_linked_is_never_forgotten():
    """However many there are, and whoever else comes and goes: of these the last ones are known
    until the next word on who is wanted."""
    book, wanted = PeerBook(), [new_incarnation() for _ in range(2 * MAX_REMEMBERED)]
    book.keep(frozenset(wanted))
    for each in wanted:
        book.mark(each, up=False, reason="probed")
        book.mark(new_incarnation(), up=False, reason="gone")
    assert [each for each in _known(book) if each in set(wanted)] == wanted
    assert len(_known(book)) == len(wanted) + MAX_REMEMBERED
    book.keep(frozenset(wanted))
    assert _known(book) == wanted


def test_why_a_new_worker_is_down_is_known_once_routers_name_it():
    """This worker may meet it first, at the address of the one before: `no peer that is known` was
    all that was said of it until the next attempt, half a minute later."""
    book = PeerBook()
    book.keep(frozenset([OLD]))
    book.mark(OLD, up=False, reason="lost")
    book.mark(NEW, up=False, reason="other weights")
    book.keep(frozenset([NEW]))
    assert book.why_down(NEW) == "other weights"
    book.mark(OLD, up=False, reason="no longer a peer")
    assert _known(book) == [NEW]


def test_a_quarantine_outlasts_what_is_forgotten():
    """A worker that routers do not name for a moment comes back with the link that was wrong."""
    book = PeerBook()
    book.keep(frozenset())
    book.quarantine(OLD, Millis(2000))
    book.mark(OLD, up=False, reason="quarantined")
    book.keep(frozenset())
    assert not book.snapshot()
    assert book.quarantine_ms_left(OLD, Millis(500)) == 1500
    for _ in range(MAX_REMEMBERED):
        book.quarantine(new_incarnation(), Millis(2000))
    assert book.quarantine_ms_left(OLD, Millis(500)) == 0
