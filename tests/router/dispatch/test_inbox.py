"""What waits to be read: given up where a reader leaves it there, never for what came meanwhile."""

from __future__ import annotations

import pytest

from tandem.protocol.outputs import EngineCoreOutput
from tandem.router.dispatch.attempt import Backlog, Inbox, weigh

SMALL = EngineCoreOutput("r", 0, 0, 0, (5,))
LARGE = EngineCoreOutput("r", 0, 0, 0, (5,) * 1_000)
ONE, MANY = weigh(SMALL), weigh(LARGE)


class Box:
    """An inbox that notes whether it was given up."""

    def __init__(self, backlog: Backlog, *, awaited: bool, tenant: str = "") -> None:
        self.given_up = False
        self.inbox: Inbox[str] = Inbox(backlog, self._overflow, tenant)
        self.inbox.awaited = awaited

    def put(self, *events: EngineCoreOutput) -> None:
        for event in events:
            self.inbox.put("leg", event)

    def sweep(self, *, stood_still: bool = False) -> None:
        self.inbox.judge(stood_still=stood_still)

    def _overflow(self) -> None:
        self.given_up = True
        self.inbox.clear()


def test_what_comes_before_the_readers_turn_is_no_fault_of_it() -> None:
    """However much one frame brings, or many that were read at once, and whoever looks then."""
    backlog = Backlog(stream_bytes=10)
    box = Box(backlog, awaited=True)
    box.put(LARGE, SMALL, LARGE, LARGE)
    box.sweep()
    box.sweep()
    assert not box.given_up
    while box.inbox.pop() is not None:
        pass
    assert (backlog.held, box.inbox.behind) == (0, 0)


def test_who_leaves_too_much_from_one_look_to_the_next_is_given_up() -> None:
    """Not at the first look, which may be the moment before it reads."""
    backlog = Backlog(stream_bytes=10)
    box = Box(backlog, awaited=False)
    box.put(SMALL, SMALL)
    box.sweep()
    box.inbox.pop()
    box.put(SMALL)
    assert not box.given_up
    box.sweep()
    assert box.given_up
    assert backlog.held == 0


def test_who_has_read_all_between_two_looks_goes_on() -> None:
    """Found twice with too much, of which nothing was the same."""
    box = Box(Backlog(stream_bytes=10), awaited=False)
    for _ in range(4):
        box.put(SMALL, SMALL)
        box.sweep()
        while box.inbox.pop() is not None:
            pass
    assert not box.given_up


def test_a_routers_own_stillness_is_not_its_clients() -> None:
    """A loop that stood still gave nobody a turn: only the look behind the next one counts."""
    box = Box(Backlog(stream_bytes=10), awaited=False)
    box.put(SMALL, SMALL)
    box.sweep()
    box.sweep(stood_still=True)
    assert not box.given_up
    box.sweep()
    assert box.given_up


def test_one_event_alone_may_have_any_size() -> None:
    box = Box(Backlog(stream_bytes=ONE), awaited=False)
    box.put(LARGE, SMALL)
    box.sweep()
    box.sweep()
    assert not box.given_up


def test_of_all_that_is_left_the_largest_goes_at_once() -> None:
    """The bound of all inboxes needs no second look; who is about to read is left alone."""
    backlog = Backlog(total_bytes=9 * ONE)
    due, little, most = (Box(backlog, awaited=each) for each in (True, False, False))
    due.put(*[SMALL] * 8)
    little.put(SMALL, SMALL)
    most.put(*[SMALL] * 9)
    assert not most.given_up
    most.put(SMALL)
    assert [each.given_up for each in (due, little, most)] == [False, False, True]
    assert backlog.held == 10 * ONE


def test_the_tenant_that_holds_most_goes_before_the_largest_answer() -> None:
    """Many small answers that one tenant does not read cost no other tenant its own."""
    backlog = Backlog(total_bytes=10 * ONE)
    hog = [Box(backlog, awaited=False, tenant="hog") for _ in range(6)]
    victim = Box(backlog, awaited=False, tenant="victim")
    victim.put(*[SMALL] * 5)
    for each in hog:
        each.put(SMALL, SMALL, SMALL)
    assert not victim.given_up
    assert any(each.given_up for each in hog)


def test_a_large_answer_that_is_about_to_be_read_costs_nobody_elses() -> None:
    """More than all may hold, in one event, while others have something that waits."""
    backlog = Backlog(total_bytes=10 * ONE)
    other, large = Box(backlog, awaited=False), Box(backlog, awaited=True)
    other.put(SMALL, SMALL)
    large.put(SMALL, LARGE, SMALL)
    other.put(SMALL)
    assert 2 * backlog.total_bytes < MANY
    assert not other.given_up
    assert not large.given_up


def test_memory_has_a_bound_whoevers_fault_it_is() -> None:
    """What comes in one turn of the loop may be twice what all may leave, and no more."""
    backlog = Backlog(total_bytes=10 * ONE)
    less, most = Box(backlog, awaited=True), Box(backlog, awaited=True)
    less.put(*[SMALL] * 5)
    most.put(*[SMALL] * 17)
    assert not most.given_up
    most.put(SMALL)
    assert (less.given_up, most.given_up) == (False, True)


def test_a_turn_in_which_nobody_is_to_blame_looks_at_all_but_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slow readers hold all that all may, and a token comes to each of many others: whoever has to
    go is not looked for once for each of these."""
    looks, behind = 0, vars(Inbox)["behind"]

    def counted(inbox: Inbox[str]) -> int:
        nonlocal looks
        looks += 1
        bytes_behind: int = behind.__get__(inbox)
        return bytes_behind

    monkeypatch.setattr(Inbox, "behind", property(counted))
    backlog = Backlog(total_bytes=64 * 16 * ONE)
    slow = [Box(backlog, awaited=False) for _ in range(64)]
    for each in slow:
        each.put(*[SMALL] * 16)
    others = [Box(backlog, awaited=True) for _ in range(256)]
    for each in others:
        each.put(SMALL)
    assert not any(each.given_up for each in (*slow, *others))
    assert looks < 20 * len(slow + others)
