"""Regular expressions for what is not a call."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby


def not_one_of(words: Iterable[str]) -> str:
    """Return an expression that begins every text before a quote which is none of ``words``.

    No word may begin another. It ends at the first character that differs, or at the quote.
    """
    groups = [(first, list(rest)) for first, rest in groupby(sorted(words), lambda word: word[:1])]
    if groups == [("", [""])]:
        return r'[^"\\]'
    firsts = "".join(first for first, _ in groups)
    ways = [f"{first}{not_one_of(word[1:] for word in rest)}" for first, rest in groups]
    return "|".join([f'("|[^{firsts}"\\\\]', *ways]) + ")"
