"""What P measures of its links: stretches in which parts were on their way, and what fits them."""

from __future__ import annotations

import pytest

from tandem.kvtransfer.mover.takes import KEPT, LEAST_BYTES, LONGEST_SECONDS, Stretch, Takes, fitted
from tandem.protocol.ids import Incarnation

D, OTHER = Incarnation(b"d" * 16), Incarnation(b"e" * 16)
TOKEN_BYTES = 10_000


class Line:
    """A link over virtual seconds."""

    def __init__(self) -> None:
        self.takes, self.now, self.held = Takes(), 50.0, 0

    def give(self, count: int = 1) -> None:
        """So many parts have slots."""
        for _ in range(count):
            self.held += 1
            self.takes.begun(D, self.now)

    def take(self, tokens: int, after: float) -> None:
        """D has read one, so many seconds later."""
        self.now += after
        self.held -= 1
        self.takes.taken(D, tokens, tokens * TOKEN_BYTES, self.now, held=self.held)


def test_a_stretch_is_all_that_was_under_way() -> None:
    """Two parts at once, the second on its way before the first is read: their tokens, and the
    time from the first slot to the last word. Idle time between stretches is nobody's."""
    line = Line()
    for _ in range(2):
        line.give(2)
        line.take(100, 0.1)
        line.take(100, 0.1)
        line.now += 30.0
    times = line.takes.times(D)
    assert times is not None
    assert times.token_s == pytest.approx(0.001)
    assert times.chunk_s == 0


def test_nothing_is_known_at_first() -> None:
    """Nor of a peer that took too little to show more than how quick messages are."""
    line = Line()
    assert line.takes.times(D) is None
    line.give()
    line.take(LEAST_BYTES // TOKEN_BYTES - 1, 0.1)
    assert line.takes.times(D) is None
    line.give()
    line.take(LEAST_BYTES // TOKEN_BYTES + 1, 0.1)
    assert line.takes.times(D) is not None
    assert line.takes.times(OTHER) is None


def test_a_link_that_is_never_idle_is_measured_all_the_same() -> None:
    """As under load, where a part always is on its way."""
    line = Line()
    line.give()
    for _ in range(8):
        line.give()
        line.take(200, LONGEST_SECONDS / 2)
    times = line.takes.times(D)
    assert times is not None
    assert times.token_s == pytest.approx(LONGEST_SECONDS / 400)


def test_what_was_given_up_does_not_count() -> None:
    """A hand-off was cancelled with a part on its way: the time until the next is no stretch's."""
    line = Line()
    line.give()
    line.held = 0
    line.takes.settle(lambda _: line.held)
    line.now += 60.0
    line.give()
    line.take(200, 0.1)
    times = line.takes.times(D)
    assert times is not None
    assert times.token_s == pytest.approx(0.0005)


def test_settling_leaves_what_is_under_way() -> None:
    """A peer that still holds a slot goes on with its stretch."""
    line = Line()
    line.give()
    line.takes.settle(lambda _: line.held)
    line.take(200, 0.1)
    assert line.takes.times(D) is not None


def test_a_lost_link_is_forgotten() -> None:
    """The next may go another way; a word of the old one changes nothing."""
    line = Line()
    line.give(2)
    line.take(200, 0.1)
    line.take(200, 0.1)
    line.give()
    line.takes.forget(D)
    assert line.takes.times(D) is None
    line.take(200, 0.1)
    assert line.takes.times(D) is None


def test_a_link_that_became_slower_is_seen_soon() -> None:
    """After most of the stretches that count."""
    line = Line()
    for seconds in [0.1] * KEPT + [0.4] * (KEPT // 2 + 1):
        line.give()
        line.take(200, seconds)
    times = line.takes.times(D)
    assert times is not None
    assert times.token_s == pytest.approx(0.002)


def test_what_each_chunk_pays_is_told_from_what_tokens_take() -> None:
    """Where sizes differ; a stray among them moves neither much."""
    sizes = (100, 200, 300, 400, 600, 800)
    stretches = [Stretch(each, 0.03 + 0.001 * each) for each in sizes]
    times = fitted([*stretches, Stretch(500, 4.0)])
    assert times.token_s == pytest.approx(0.001, rel=0.1)
    assert times.chunk_s == pytest.approx(0.03, rel=0.5)


@pytest.mark.parametrize(
    "stretches",
    [
        [Stretch(500, 0.5), Stretch(520, 0.52)],  # sizes are alike
        [Stretch(100, 0.1), Stretch(500, 0.1), Stretch(500, 2.4)],  # longer ones took no longer
        [Stretch(100, 0.01), Stretch(400, 0.4)],  # what is paid once would be less than nothing
    ],
)
def test_else_all_is_put_down_to_tokens(stretches: list[Stretch]) -> None:
    """The median of seconds a token."""
    times = fitted(stretches)
    rates = sorted(each.seconds / each.tokens for each in stretches)
    assert times.chunk_s == 0
    assert rates[0] <= times.token_s <= rates[-1]
