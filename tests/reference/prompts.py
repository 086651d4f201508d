"""The 64 prompts of the token-for-token comparison: varied, 16 to 3,000 tokens, made from a seed.

Text comes from small grammars (prose, code, lists, dialogue, unicode), so nothing is downloaded
and anybody gets the same prompts. Some share long prefixes on purpose.
"""

from __future__ import annotations

import random
from collections.abc import Callable

COUNT = 64
SHORTEST = 16
LONGEST = 3000
SHARED_PREFIX_TOKENS = 320

_SUBJECTS = (
    "the captain",
    "a baker",
    "my neighbour",
    "the old engineer",
    "Maria",
    "the committee",
    "a fox",
)
_VERBS = ("measured", "forgot", "repaired", "counted", "described", "carried", "painted", "doubted")
_OBJECTS = (
    "the northern bridge",
    "seven lanterns",
    "an unsigned letter",
    "the tide tables",
    "a copper kettle",
    "the third violin",
    "an atlas of rivers",
    "two hundred bricks",
)
_WHEN = (
    "before noon",
    "in the spring of 1911",
    "without a word",
    "twice",
    "as the rain began",
    "on Tuesdays",
)
_PLACES = (
    "Lisbon",
    "Kyoto",
    "Tromsø",
    "Zürich",
    "São Paulo",
    "Kraków",
    "Łódź",
    "Reykjavík",
    "İzmir",
)
_EMOJI = ("🙂", "🚢", "🧭", "👩\u200d🚀", "é", "漢字", "данные", "مرحبا", "ﬁ")


def _prose(draw: random.Random) -> str:
    sentence = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
    return f"{sentence.capitalize()} {draw.choice(_WHEN)}, near {draw.choice(_PLACES)}. "


def _code(draw: random.Random) -> str:
    name = draw.choice(["total", "merge", "walk", "parse", "retry"])
    number = draw.randint(2, 99)
    return (
        f"def {name}_{number}(items):\n    result = []\n    for item in items:\n"
        f"        if item % {number} == {draw.randint(0, 1)}:\n            result.append(item * "
        f"{draw.randint(2, 9)})\n    return result\n\n"
    )


def _table(draw: random.Random) -> str:
    place = draw.choice(_PLACES)
    return f"| {place} | {draw.randint(1, 999)} | {draw.random():.3f} | {draw.choice(_EMOJI)} |\n"


def _dialogue(draw: random.Random) -> str:
    return f'"Is it {draw.choice(_WHEN)}?" asked {draw.choice(_SUBJECTS)}. "No, {_prose(draw)}"\n'


_KINDS: list[Callable[[random.Random], str]] = [_prose, _code, _table, _dialogue]


def lengths(shortest: int = SHORTEST, longest: int = LONGEST) -> list[int]:
    """Prompt lengths in tokens, spaced by a constant ratio from shortest to longest."""
    ratio = (longest / shortest) ** (1 / (COUNT - 1))
    return [round(shortest * ratio**index) for index in range(COUNT)]


def make_prompts(
    encode: Callable[[str], list[int]], shortest: int = SHORTEST, longest: int = LONGEST
) -> list[list[int]]:
    """Token ids of the prompts, shortest first. ``encode`` must add no special tokens."""
    shared = _ids(random.Random(0), _prose, SHARED_PREFIX_TOKENS, encode)
    prompts = []
    for index, length in enumerate(lengths(shortest, longest)):
        draw = random.Random(1000 + index)
        ids = _ids(draw, _KINDS[index % len(_KINDS)], length, encode)
        if index % 3 == 0 and length > SHARED_PREFIX_TOKENS:
            ids = shared + ids[SHARED_PREFIX_TOKENS:]
        prompts.append(ids)
    return prompts


def _ids(
    draw: random.Random,
    kind: Callable[[random.Random], str],
    length: int,
    encode: Callable[[str], list[int]],
) -> list[int]:
    ids: list[int] = []
    while len(ids) < length:
        ids += encode("".join(kind(draw) for _ in range(20)))
    return ids[:length]
