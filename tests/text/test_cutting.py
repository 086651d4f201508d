"""Cutting prompts of which the ends are read, too."""

from __future__ import annotations

import pytest

from tandem.text.input_processor import cut_within_ends

CLS, SEP = 101, 102
SPECIAL = {CLS, SEP}
ONE = [CLS, 1, 2, 3, 4, 5, SEP]
PAIR = [CLS, 1, 2, 3, SEP, 4, 5, SEP]


@pytest.mark.parametrize(
    ("ids", "keep", "from_left", "cut"),
    [
        (ONE, 4, True, [CLS, 4, 5, SEP]),
        (ONE, 4, False, [CLS, 1, 2, SEP]),
        (ONE, 3, True, [CLS, 5, SEP]),
        (ONE, 2, True, [5, SEP]),
        (ONE, 1, False, [CLS]),
        ([1, 2, 3, SEP], 2, False, [1, SEP]),
        ([1, 2, 3], 2, True, [2, 3]),
        ([CLS, CLS, CLS], 2, True, [CLS, CLS]),
    ],
)
def test_what_stands_around_a_text_stays(
    ids: list[int], keep: int, from_left: bool, cut: list[int]
) -> None:
    """As long as it fits with at least one token of the text."""
    assert cut_within_ends(ids, keep, None, SPECIAL, from_left=from_left) == (cut, None)


@pytest.mark.parametrize(
    ("keep", "from_left", "cut", "at"),
    [
        (7, True, [CLS, 2, 3, SEP, 4, 5, SEP], 4),
        (4, True, [CLS, 4, 5, SEP], 1),
        (3, True, [CLS, 5, SEP], 1),
        (7, False, [CLS, 1, 2, 3, SEP, 4, SEP], 5),
        (5, False, [CLS, 1, 2, 3, SEP], 4),
        (2, False, [CLS, 1], None),
    ],
)
def test_the_second_text_goes_with_its_tokens(
    keep: int, from_left: bool, cut: list[int], at: int | None
) -> None:
    """Also where nothing of the first text is left, or of the second but its end."""
    assert cut_within_ends(PAIR, keep, 5, SPECIAL, from_left=from_left) == (cut, at)
