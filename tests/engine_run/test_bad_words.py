"""Bad words by the thousand cost a step no more than a few: the words are looked up, not walked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.sample.rules import BadWords

ids = st.integers(0, 3)
words_of = st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=12)


@given(words_of, st.lists(ids, max_size=6))
def test_what_is_forbidden_is_what_the_plain_rule_says(
    words: list[tuple[int, ...]], tail: list[int]
) -> None:
    """Each word's last token after its others, and single tokens always."""
    plain = {
        word[-1] for word in words if len(word) == 1 or tuple(tail[1 - len(word) :]) == word[:-1]
    }
    known = BadWords(words)
    assert set(known.forbidden(tail).tolist()) == plain
    assert bool(known) == bool(words)


class Counted(tuple[int, ...]):
    """A tail that counts how often it is cut."""

    cuts = 0

    def __getitem__(self, key: object) -> object:  # type: ignore[override]
        Counted.cuts += 1
        return super().__getitem__(key)  # type: ignore[call-overload]


def test_a_step_looks_once_for_each_length() -> None:
    words = BadWords([(n, n + 1, n + 2) for n in range(4_000)] + [(n, 7) for n in range(4_000)])
    assert words.forbidden(Counted((5, 1, 2))).tolist() == [3, 7]
    assert Counted.cuts == 2
