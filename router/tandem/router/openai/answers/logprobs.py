"""Log-probabilities in three shapes: chat's, completions', vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandem.text.logprobs import Logprob, PositionLogprobs

_TOKEN_SIZE = 20
"""Cost of one token at one position, for ``Beside``: it takes 1.4 us to write."""


def size_of(positions: Sequence[PositionLogprobs | None] | None) -> int:
    """Return the cost of writing log-probabilities, in the unit of ``Beside.run``."""
    if not positions:
        return 0
    last = positions[-1]  # the first of a prompt is None
    return _TOKEN_SIZE * len(positions) * (1 if last is None else 1 + len(last.top))


def chat_logprobs(positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
    """Return ``choices[].logprobs`` of a chat."""
    if positions is None:
        return None
    content = [
        {**_token(each.sampled), "top_logprobs": [_token(top) for top in each.top]}
        for each in positions
    ]
    return {"content": content, "refusal": None}


def _token(each: Logprob) -> dict[str, Any]:
    return {"token": each.decoded_token, "logprob": each.logprob, "bytes": list(each.bytes)}


def completion_logprobs(
    positions: Iterable[PositionLogprobs | None], offsets: Sequence[int], first: str = ""
) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of completions. A position that is None, the first of a prompt,
    has the text ``first``; ``offsets`` are the tokens' offsets in the text."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for each in positions:
        if each is None:
            tokens.append(first)
            values.append(None)
            tops.append(None)
            continue
        text, value = each.sampled.decoded_token, each.sampled.logprob
        top = {best.decoded_token: best.logprob for best in each.top}
        top.setdefault(text, value)
        tokens.append(text)
        values.append(value)
        tops.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return the completion logprobs of a prompt and the text after it."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's ``prompt_logprobs``: per position a mapping by token id."""
    if positions is None:
        return None
    return [None if each is None else _by_id(each) for each in positions]


def _by_id(position: PositionLogprobs) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": each.logprob,
            "rank": each.rank,
            "decoded_token": each.decoded_token,
        }
        for token_id, each in position.items()
    }
