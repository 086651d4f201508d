"""Stop strings are found wherever token borders fall."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.errors import InvalidParameter
from tandem.text.pieces import MAX_STOP_CHARS, StopMatcher, check_stops

pytestmark = pytest.mark.full

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def one_shot(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The rule on a whole text: the match that ends first, then the one that starts first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def split(text: str, borders: list[int]) -> list[str]:
    """``text`` cut at the borders (taken modulo its length)."""
    cuts = sorted({border % (len(text) + 1) for border in borders} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(cuts)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 60), max_size=12), st.booleans())
@settings(max_examples=600, deadline=None)
def test_any_split_gives_the_one_shot_text(
    text: str, stops: list[str], borders: list[int], include: bool
) -> None:
    """Text, stop string and what is kept depend on the text alone."""
    matcher = StopMatcher(stops, include=include)
    shown = ""
    for piece in split(text, borders):
        shown += matcher.feed(piece)
        if matcher.found is not None:
            break
    else:
        shown += matcher.end()

    assert one_shot(text, stops, include=include) == (shown, matcher.found)


@given(LETTERS, STOPS)
@settings(max_examples=300, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    """What is not shown yet is exactly the longest end with which a stop string begins."""
    matcher = StopMatcher(stops)
    shown = ""
    for letter in text:
        shown += matcher.feed(letter)
        if matcher.found is not None:
            return
    ends = [text[start:] for start in range(len(text))]
    may = [end for end in ends if any(s.startswith(end) and s != end for s in stops)]

    assert text[: len(text) - len(max(may, key=len, default=""))] == shown


def test_an_unarmed_match_is_passed_over() -> None:
    """Before ``min_tokens`` a stop string is text like any other."""
    matcher = StopMatcher(["ab", "abcd"])

    assert matcher.feed("ab", armed=False) == ""
    assert matcher.feed("x") == "abx"
    assert matcher.found is None
    assert matcher.feed("yab") == "y"
    assert matcher.found == "ab"


def test_a_stop_string_that_began_unarmed_counts_when_it_ends_armed() -> None:
    matcher = StopMatcher(["\n\nUser:"])

    assert matcher.feed("Hi\n", armed=False) == "Hi"
    assert matcher.feed("\nUser") == ""
    assert matcher.feed(": what") == ""
    assert matcher.found == "\n\nUser:"


def test_endless_stop_strings_are_refused() -> None:
    """A stop string bounds the work per token, so its length is bounded."""
    check_stops(["x" * MAX_STOP_CHARS])
    with pytest.raises(InvalidParameter, match=r"^stop: .*at most 1024 characters"):
        check_stops(["\n", "x" * (MAX_STOP_CHARS + 1)])
