"""Server-sent events of a stream as bytes: the hot path of the router, once per token.

The constant part of a stream's chunks is encoded once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tandem.protocol.outputs import FinishReason
from tandem.text.output_processor import Logprob, PositionLogprobs

_TOKEN_SIZE = 20
"""Cost of one token at one position, for ``CpuPool``."""


def size_of(positions: Sequence[PositionLogprobs | None] | None) -> int:
    """Return the cost of writing log-probabilities, for ``CpuPool.run``."""
    if not positions:
        return 0
    last = positions[-1]  # a prompt's first is None
    return _TOKEN_SIZE * len(positions) * (1 if last is None else 1 + len(last.top))


def chat_logprobs(positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
    """Return the ``logprobs`` of a chat's choice."""
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
    """Return the ``logprobs`` of a completion's choice.

    A position that is None, a prompt's first, has the text ``first``; ``offsets`` are in the text.
    """
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
    """Return the logprobs of a prompt and its answer."""
    return {key: first[key] + second[key] for key in first}


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's ``prompt_logprobs``: a mapping by token id for each position."""
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


_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage(
    num_prompt: int, num_generated: int, num_cached: int | None, num_reasoning: int | None = None
) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    details = {"completion_tokens_details": {"reasoning_tokens": num_reasoning}}
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached or 0},
        **({} if num_reasoning is None else details),
    }


def event(content: object) -> bytes:
    """Return one event with any content."""
    return b"data: " + _encode(content) + b"\n\n"


class ChunkWriter:
    """Chunks of one stream.

    ``kind`` is the object's name. ``opening`` and ``closing`` enclose a choice's text.
    """

    def __init__(
        self,
        *,
        stream_id: str,
        kind: str,
        created: int,
        model: str,
        opening: bytes,
        closing: bytes,
        says_usage: bool,
    ) -> None:
        head = {"id": stream_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['
        self._index = b'{"index":'
        self._opening = b"," + opening
        self._closing = closing
        self._usual = closing + b',"logprobs":null,"finish_reason":null}]'
        self._end = b',"usage":null}\n\n' if says_usage else b"}\n\n"
        self._tail = self._usual + self._end
        self._begin = [self._head + self._index + b"%d" % n + self._opening for n in range(8)]

    def text(self, index: int, text: str) -> bytes:
        begin = self._begin
        head = begin[index] if index < 8 else self._start(index)
        return head + _encode(text) + self._tail

    def full(
        self,
        index: int,
        text: str,
        *,
        logprobs: object = None,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        extras: dict[str, Any] | None = None,
        usage: object = None,
    ) -> bytes:
        """Return a chunk with all other fields."""
        content = [self._start(index), _encode(text), self._closing]
        return self._with_end(content, logprobs, finish, stop_reason, extras, usage)

    def delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        *,
        logprobs: object = None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
        extras: dict[str, Any] | None = None,
        usage: object = None,
    ) -> bytes:
        """Return a chunk of a chat without content."""
        content = [self._head, self._index, b'%d,"delta":' % index, _encode(delta)]
        return self._with_end(content, logprobs, finish, stop_reason, extras, usage)

    def _with_end(
        self,
        parts: list[bytes],
        logprobs: object,
        finish: str | None,
        stop_reason: int | str | None,
        extras: dict[str, Any] | None,
        usage: object,
    ) -> bytes:
        parts += [b',"logprobs":', _encode(logprobs), b',"finish_reason":', _encode(finish)]
        if finish is not None:
            parts += [b',"stop_reason":', _encode(stop_reason)]
        return b"".join([*parts, *_members(extras or {}), b"}]", self._close(usage)])

    def raw(
        self, index: int, content: bytes, usage: object = None, extras: dict[str, Any] | None = None
    ) -> bytes:
        """Return a chunk whose choice has ``content``, one or several JSON members.

        ``extras`` are next to the choices.
        """
        parts = [self._head, self._index, b"%d," % index, content]
        parts += [b',"logprobs":null,"finish_reason":null}]', *_members(extras or {})]
        return b"".join([*parts, self._close(usage)])

    def last_usage(self, usage: object) -> bytes:
        return self._head + b'],"usage":' + _encode(usage) + b"}\n\n"

    def _start(self, index: int) -> bytes:
        return self._head + self._index + b"%d" % index + self._opening

    def _close(self, usage: object) -> bytes:
        return self._end if usage is None else b',"usage":' + _encode(usage) + b"}\n\n"


def _members(extras: dict[str, Any]) -> list[bytes]:
    return [b"," + _encode(name) + b":" + _encode(value) for name, value in extras.items()]


def chat_writer(*, stream_id: str, created: int, model: str, says_usage: bool) -> ChunkWriter:
    """Return a writer of ``chat.completion.chunk``."""
    return ChunkWriter(
        stream_id=stream_id,
        kind="chat.completion.chunk",
        created=created,
        model=model,
        opening=b'"delta":{"content":',
        closing=b"}",
        says_usage=says_usage,
    )


def completion_writer(*, stream_id: str, created: int, model: str, says_usage: bool) -> ChunkWriter:
    """Return a writer of ``text_completion``."""
    return ChunkWriter(
        stream_id=stream_id,
        kind="text_completion",
        created=created,
        model=model,
        opening=b'"text":',
        closing=b"",
        says_usage=says_usage,
    )
