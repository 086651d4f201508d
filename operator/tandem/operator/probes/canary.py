"""The canary: one question through router, prefill and decode, compared with decode alone.

Models continue a series of numbers with certainty, so both answers must be equal. A salt prevents
cache hits, which would skip the KV path. For pooling tasks it requests a vector, classes or a
score.
"""

from __future__ import annotations

import json
import math
import secrets
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException
from typing import Any

import msgspec

from tandem.operator.api.service import Task
from tandem.operator.api.status import Reason
from tandem.operator.decide.words import Verdict
from tandem.operator.probes.fleet import read_fleet
from tandem.protocol import names

TEXTS = ["The capital of France is Paris.", "A cat sat on the mat."]
LIKE_ITSELF = 1e-2
"""Maximum difference from 1 of a vector's cosine with itself."""


class CanaryError(Exception):
    """The answer is wrong; the text describes it."""


def embeddings(answer: Mapping[str, Any]) -> str:
    """Check the vectors of both texts and the first again; return a message. Raises CanaryError."""
    first, other, again = (_numbers(item, "embedding") for item in _items(answer, 3))
    if not len(first) == len(other) == len(again):
        lengths = (len(first), len(other), len(again))
        raise CanaryError(f"one model returned vectors of {lengths} values")
    cosine = _cosine(first, again)
    if abs(cosine - 1) > LIKE_ITSELF:
        raise CanaryError(f"two vectors of one text have a cosine of {cosine:.3f}")
    _cosine(first, other)
    return f"texts became vectors of {len(first)} values"


def classes(answer: Mapping[str, Any]) -> str:
    """Check the classes of both texts; return a message. Raises CanaryError."""
    counts = {len(_numbers(item, "probs")) for item in _items(answer, 2)}
    if len(counts) != 1:
        raise CanaryError(f"one model returned {sorted(counts)} classes for different texts")
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


def _items(answer: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    data = answer.get("data")
    if not isinstance(data, list) or len(data) != count:
        raise CanaryError(f"the answer holds no list of {count}: {str(answer)[:200]}")
    if not all(isinstance(item, Mapping) for item in data):
        raise CanaryError(f"the answer contains values that are not objects: {str(data)[:200]}")
    return data


def _numbers(item: Mapping[str, Any], name: str) -> list[float]:
    values = item.get(name)
    numbers = isinstance(values, list) and bool(values)
    if not numbers or not all(_is_finite(each) for each in values or ()):
        raise CanaryError(f"{name}: {str(values)[:100]} are not finite numbers")
    assert isinstance(values, list), "seen above"
    return values


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _cosine(first: list[float], second: list[float]) -> float:
    lengths = math.hypot(*first) * math.hypot(*second)
    if not lengths:
        raise CanaryError("a vector is all zeros")
    return sum(a * b for a, b in zip(first, second, strict=True)) / lengths


PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,"
TOKENS = 8
TIMEOUT = 30.0
FLEET_TIMEOUT = 5.0
_FULL = ("overloaded", "rate_limit_exceeded", "capacity")
"""Codes of a full router or full workers."""
_LATE = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.GATEWAY_TIMEOUT)
_RATES = ("prompt_tokens_per_s", "generated_tokens_per_s")
_DISAGGREGATED, _AGGREGATED = "disaggregated", "aggregated"


class CanaryQueued(CanaryError):
    """The question got no turn, which proves nothing."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a canary, and its router."""

    base_url: str
    """URL of one router pod."""
    model: str
    token: str
    """Secret that marks canaries."""
    targets: str
    """Name of the checked revisions."""
    prefill_revision: str | None
    """Revision of the prefill workers; None without hand-off."""
    decode_revision: str | None
    """Revision of the decode workers; None if only prefill workers answer."""
    task: Task = Task.GENERATE


def ask(question: Question, now: float) -> Verdict:
    """Send the question and judge the answers. Never raises for a router's failure."""
    try:
        if question.task is Task.GENERATE:
            reason, message = _judge(question)
        else:
            path, body, judge = POOLED[question.task]
            content, _ = post(question, path, body)
            reason, message = Reason.CANARY_OK, judge(content)
    except CanaryQueued as error:
        reason, message = Reason.CANARY_QUEUED, str(error)
    except CanaryError as error:
        reason, message = Reason.CANARY_FAILED, str(error)
    ok = reason is Reason.CANARY_OK
    return Verdict(ok=ok, reason=reason, message=message, targets=question.targets, at=now)


def _judge(question: Question) -> tuple[Reason, str]:
    alone, _ = complete(question, _AGGREGATED)
    if question.prefill_revision is None:
        return Reason.CANARY_OK, f"decode alone answered {alone!r}"
    answer, shape = complete(question, _DISAGGREGATED)
    if shape != _DISAGGREGATED:
        reported = shape or "not reported"
        text = f"the answer did not use KV of a prefill worker (shape: {reported})"
        return Reason.CANARY_NOT_DISAGGREGATED, text
    if answer != alone:
        text = f"with KV: {answer!r}; decode alone: {alone!r}"
        return Reason.CANARY_FAILED, text
    return Reason.CANARY_OK, "the canary request succeeded over router, prefill, KV and decode"


def complete(question: Question, shape: str) -> tuple[str, str | None]:
    """Return the text of one completion and its serving shape. Raises CanaryError."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    content, served = post(question, "/v1/completions", body, shape)
    try:
        return content["choices"][0]["text"], served
    except (LookupError, TypeError) as error:
        raise CanaryError(f"no answer from {question.base_url}: {error!r}") from error


def post(
    question: Question, path: str, fields: dict[str, Any], shape: str | None = None
) -> tuple[dict[str, Any], str | None]:
    """Return the router's answer and its serving shape. Raises CanaryError."""
    body = {"model": question.model, "cache_salt": secrets.token_hex(8), **fields}
    given = {
        names.HEADER_CANARY: question.token,
        names.HEADER_SHAPE: shape,
        names.HEADER_PREFILL_REVISION: question.prefill_revision,
        names.HEADER_DECODE_REVISION: question.decode_revision,
    }
    headers = {name: value for name, value in given.items() if value is not None}
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(question.base_url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            content = json.load(answer)
            served = answer.headers.get(names.HEADER_SHAPE)
    except urllib.error.HTTPError as error:
        shown = _error_text(error)
        text = f"HTTP {error.code}: {shown}"
        if is_full(error.code, shown) or (error.code in _LATE and serves_others(question)):
            raise CanaryQueued(text) from error
        raise CanaryError(text) from error
    except (OSError, ValueError, HTTPException) as error:
        text = f"no answer from {question.base_url}: {error}"
        if _is_timeout(error) and serves_others(question):
            raise CanaryQueued(f"{text}; other requests are served") from error
        raise CanaryError(text) from error
    if not isinstance(content, dict):
        raise CanaryError(f"no answer from {question.base_url}: not an object")
    return content, served


def is_full(status: int, body: str) -> bool:
    """Return whether a router refuses because it has too many requests."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return True
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return False
    return status == HTTPStatus.SERVICE_UNAVAILABLE and code in _FULL


def serves_others(question: Question) -> bool:
    """Return whether workers are busy now: a late answer then only waited."""
    try:
        workers = read_fleet(question.base_url, question.token, FLEET_TIMEOUT)["workers"]
        return any(each.get(rate) for each in workers for rate in _RATES)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _is_timeout(error: Exception) -> bool:
    reason = getattr(error, "reason", None)
    return isinstance(error, TimeoutError) or isinstance(reason, TimeoutError)


def _error_text(error: urllib.error.HTTPError) -> str:
    """Return the beginning of an error's body."""
    try:
        return error.read(500).decode(errors="replace")
    except (OSError, HTTPException) as lost:
        return f"and no more: {lost}"
