"""The canary: one question through router, prefill and decode, compared with decode alone.

Numbers in a row are what any language model goes on with surely, so that both answers must be
equal though they were computed in different steps. A salt of its own keeps the question from
hitting a prefix that is cached already, which would not cross the KV path. Talks HTTP to one router
pod; called by ``probing`` in a thread.
"""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from typing import Any

import msgspec

from tandem.operator.api.conditions import Reason
from tandem.operator.decide.verdict import Verdict
from tandem.protocol import names

PROMPT = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,"
TOKENS = 8
TIMEOUT = 30.0
_DISAGGREGATED, _AGGREGATED = "disaggregated", "aggregated"


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Whom to ask for what."""

    base_url: str
    """Of one router pod."""
    model: str
    token: str
    """Secret that marks canaries."""
    targets: str
    """Name of the revisions that are asked, as ``rollout`` names them."""
    prefill_revision: str | None
    """None asks without hand-off."""
    decode_revision: str


class CanaryError(Exception):
    """The question got no answer that can be used; says what it got."""


def ask(question: Question, now: float) -> Verdict:
    """Ask, compare, and judge. Never raises for what a router answers or does not."""
    try:
        reason, message = _judge(question)
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
        said = shape or "not said"
        text = f"an answer came, but not from a prefill worker's KV (shape: {said})"
        return Reason.CANARY_NOT_DISAGGREGATED, text
    if answer != alone:
        text = f"over the KV path: {answer!r}; decode alone: {alone!r}"
        return Reason.CANARY_FAILED, text
    return Reason.CANARY_OK, "a prompt went through router, prefill, KV and decode, and came back"


def complete(question: Question, shape: str) -> tuple[str, str | None]:
    """Text of one completion and the shape in which it was served. Raises CanaryError."""
    body = {
        "model": question.model,
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "cache_salt": secrets.token_hex(8),
    }
    headers = {
        "Content-Type": "application/json",
        names.HEADER_CANARY: question.token,
        names.HEADER_SHAPE: shape,
        names.HEADER_DECODE_REVISION: question.decode_revision,
    }
    if question.prefill_revision is not None:
        headers[names.HEADER_PREFILL_REVISION] = question.prefill_revision
    request = urllib.request.Request(
        f"{question.base_url}/v1/completions", json.dumps(body).encode(), headers
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            content: dict[str, Any] = json.load(answer)
            return content["choices"][0]["text"], answer.headers.get(names.HEADER_SHAPE)
    except urllib.error.HTTPError as error:
        said = error.read(500).decode(errors="replace")
        raise CanaryError(f"HTTP {error.code}: {said}") from error
    except (OSError, ValueError, LookupError) as error:
        raise CanaryError(f"no answer from {question.base_url}: {error}") from error
