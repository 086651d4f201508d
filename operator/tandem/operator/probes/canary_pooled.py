"""Requests of canaries to services without tokens, and checks of the answers.

The result for a text depends on the model. Two facts hold for all: one text has the same result at
each place of a call, and numbers are finite. Pure; ``canary`` sends and receives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tandem.operator.api.service import Task

TEXTS = ["The capital of France is Paris.", "A cat sat on the mat."]
LIKE_ITSELF = 1e-2
"""Largest distance from one of the cosine of a text's vector with itself: steps of other sizes
round otherwise."""


class CanaryError(Exception):
    """The answer cannot be used; the text describes it."""


def embeddings(answer: Mapping[str, Any]) -> str:
    """Check the vectors of both texts and the first again; return a message. Raises CanaryError."""
    first, other, again = (_numbers(item, "embedding") for item in _items(answer, 3))
    if not len(first) == len(other) == len(again):
        lengths = (len(first), len(other), len(again))
        raise CanaryError(f"vectors of {lengths} values came of one model")
    cosine = _cosine(first, again)
    if abs(cosine - 1) > LIKE_ITSELF:
        raise CanaryError(f"two vectors of one text have a cosine of {cosine:.3f}")
    _cosine(first, other)
    return f"texts became vectors of {len(first)} values"


def classes(answer: Mapping[str, Any]) -> str:
    """Check the classes of both texts; return a message. Raises CanaryError."""
    counts = {len(_numbers(item, "probs")) for item in _items(answer, 2)}
    if len(counts) != 1:
        raise CanaryError(f"texts have {sorted(counts)} classes of one model")
    return f"texts have one of {counts.pop()} classes"


def scores(answer: Mapping[str, Any]) -> str:
    """Check the scores of two pairs; return a message. Raises CanaryError."""
    for item in _items(answer, 2):
        _numbers({"score": [item.get("score")]}, "score")
    return "pairs of texts have scores"


POOLED: Mapping[Task, tuple[str, dict[str, Any], Callable[[Mapping[str, Any]], str]]] = {
    Task.EMBED: (
        "/v1/embeddings",
        {"input": [*TEXTS, TEXTS[0]], "encoding_format": "float"},
        embeddings,
    ),
    Task.CLASSIFY: ("/classify", {"input": TEXTS}, classes),
    Task.SCORE: ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}, scores),
}
"""Path, body and check by task."""


def _items(answer: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    data = answer.get("data")
    if not isinstance(data, list) or len(data) != count:
        raise CanaryError(f"the answer holds no list of {count}: {str(answer)[:200]}")
    if not all(isinstance(item, Mapping) for item in data):
        raise CanaryError(f"the answer holds other things than objects: {str(data)[:200]}")
    return data


def _numbers(item: Mapping[str, Any], name: str) -> list[float]:
    values = item.get(name)
    numbers = isinstance(values, list) and bool(values)
    if not numbers or not all(_is_finite(each) for each in values or ()):
        raise CanaryError(f"{name}: {str(values)[:100]} are no finite numbers")
    assert isinstance(values, list), "seen above"
    return values


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _cosine(first: list[float], second: list[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    if not lengths:
        raise CanaryError("a vector is all zeros")
    return sum(a * b for a, b in zip(first, second, strict=True)) / lengths
