"""Log-probabilities in the three shapes that clients know: chat's, completions', vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tandem.text.logprobs import Logprob, PositionLogprobs


def chat_logprobs(positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
    """``choices[].logprobs`` of a chat."""
    if positions is None:
        return None
    content = [
        {**_token(each.sampled), "top_logprobs": [_token(top) for top in each.top]}
        for each in positions
    ]
    return {"content": content, "refusal": None}


def _token(each: Logprob) -> dict[str, Any]:
    return {"token": each.decoded_token, "logprob": each.logprob, "bytes": list(each.bytes)}


class CompletionLogprobs:
    """``choices[].logprobs`` of completions; offsets go on over the chunks of one choice."""

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset

    def render(
        self,
        positions: Iterable[PositionLogprobs | None],
        texts: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """Of these positions; ``texts`` name the tokens of positions that are None."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for index, each in enumerate(positions):
            if each is None:
                text, value, top = (texts or [""])[index], None, None
            else:
                text, value = each.sampled.decoded_token, each.sampled.logprob
                top = {best.decoded_token: best.logprob for best in each.top}
                top.setdefault(text, value)
            tokens.append(text)
            values.append(value)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Completion logprobs of a prompt and what follows it."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's ``prompt_logprobs``: per position a mapping by token id."""
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
