"""One streamed request to an OpenAI URL, with the time of each piece of its answer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from tandem.cli.bench.load import Ask


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Record:
    """Times and result of one request, in seconds after the run's start."""

    num_prompt: int
    sent_at: float
    times: list[float] = field(default_factory=list)
    """Arrival time of each piece of text."""
    num_tokens: int = 0
    """Generated tokens, as the server reports them."""
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent_at

    @property
    def e2e(self) -> float:
        return self.times[-1] - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Return the seconds per token after the first; None for a single token."""
        return (self.e2e - self.ttft) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Target:
    """URL of the measured endpoint, with the headers and body fields of every request."""

    url: str
    model: str
    headers: dict[str, str]
    body: dict[str, Any]
    """Fields of every body."""

    def content(self, ask: Ask) -> dict[str, Any]:
        """Return the body of one request, a completion, since it has ids."""
        return {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }


async def send(session: aiohttp.ClientSession, target: Target, ask: Ask, started: float) -> Record:
    """Send a request and read its answer. Errors are part of the record."""
    content = msgspec.json.encode(target.content(ask))
    headers = {"Content-Type": "application/json", **target.headers}
    record = Record(len(ask.prompt), time.perf_counter() - started)
    try:
        async with session.post(target.url, data=content, headers=headers) as answer:
            if answer.status != 200:
                text = (await answer.text())[:300]
                record.error = f"HTTP {answer.status}: {text}"
            else:
                await _read(answer, record, started)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and not record.times:
        record.error = "the stream ended without a token"
    return record


async def _read(answer: aiohttp.ClientResponse, record: Record, started: float) -> None:
    """Read events as they arrive; those of one read get one time.

    Only ``[DONE]`` shows that the answer is complete.
    """
    rest = b""
    done = counted = False
    async for data in answer.content.iter_any():
        now = time.perf_counter() - started
        rest += data
        if b"\r" in rest:  # line ends: JSON has no \r
            rest = rest.replace(b"\r\n", b"\n")
        *events, rest = rest.split(b"\n\n")
        for content in map(_content, events):
            if content == b"[DONE]":
                done = True
            elif content:
                counted |= _note(record, _decoder.decode(content), now)
        if record.error is not None:
            return
    if not done and _content(rest) != b"[DONE]":
        record.error = "the stream was cut: it ended without [DONE]"
    elif record.times and not counted:
        record.error = "the answer has no usage: its tokens cannot be counted"


def _content(event: bytes) -> bytes:
    """Return the data of an event, or b""."""
    if event.startswith(b"data:") and b"\n" not in event:  # the usual case
        return event[5:].strip()
    lines = event.split(b"\n")
    return b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))


def _note(record: Record, chunk: _Chunk, now: float) -> bool:
    if chunk.error is not None:
        record.error = f"in the stream: {chunk.error}"[:300]
    if chunk.usage is not None:
        record.num_tokens = chunk.usage.completion_tokens
    # Steps without text count, too: omitting them would extend gaps.
    if any(choice.text is not None or choice.delta for choice in chunk.choices):
        record.times.append(now)
    return chunk.usage is not None
