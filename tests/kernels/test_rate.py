"""What copies are foretold to take, from what earlier ones took."""

from __future__ import annotations

import math

import pytest

from tandem.memory.device import LARGE_BYTES, MOST_TIMES, Rate

MB = 1 << 20


def test_nothing_is_foretold_before_a_copy_was_timed() -> None:
    """A guess would make who waits sleep through the end."""
    assert Rate().seconds_for(MB) == math.inf


def test_small_copies_foretell_no_large_one() -> None:
    """They spend their time on other things than bytes."""
    rate = Rate()
    rate.took(MB, 1.0)
    assert rate.seconds_for(MOST_TIMES * MB) == pytest.approx(MOST_TIMES)
    assert rate.seconds_for(MOST_TIMES * MB + 1) == math.inf


def test_small_copies_do_not_slow_what_large_ones_have_shown() -> None:
    """The link's rate stays; a copy that is large in itself counts, however large others were."""
    rate = Rate()
    rate.took(100 * LARGE_BYTES, 100.0)
    for _ in range(100):
        rate.took(LARGE_BYTES - 1, 10.0)
    assert rate.seconds_for(LARGE_BYTES) == pytest.approx(1.0)
    for _ in range(200):
        rate.took(LARGE_BYTES, 2.0)
    assert rate.seconds_for(LARGE_BYTES) == pytest.approx(2.0, rel=0.01)


def test_a_faster_copy_counts_at_once_and_a_slower_one_by_and_by() -> None:
    rate = Rate()
    rate.took(MB, 2.0)
    rate.took(MB, 1.0)
    assert rate.seconds_for(MB) == pytest.approx(1.0)
    rate.took(MB, 2.0)
    assert 1.0 < rate.seconds_for(MB) < 1.1
