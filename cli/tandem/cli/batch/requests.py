"""Client of a batch: sends requests, and writes each answer as it arrives."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import httpx
import msgspec

from tandem.protocol.errors import InvalidParameter

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/v1/rerank", "/score", "/rerank", "/pooling", "/classify"),
)
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID = 512


class BatchRequest(msgspec.Struct, frozen=True):
    """Line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_lines(source: BinaryIO) -> Iterator[BatchRequest]:
    """Yield a file's requests. Raises InvalidParameter that names the line."""
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise _wrong(number, "line", f"{len(line)} bytes", f"at most {MAX_LINE_BYTES}")
        if line.strip():
            yield _request(number, line)


def check_lines(source: BinaryIO) -> int:
    """Return the number of requests of a file, and seek to its start.

    Raises InvalidParameter for the first invalid one.
    """
    seen: set[str] = set()
    for number, request in enumerate(read_lines(source), 1):
        if request.custom_id in seen:
            allowed = "an id that no line before has"
            raise InvalidParameter(f"request {number}: custom_id", request.custom_id, allowed)
        seen.add(request.custom_id)
    source.seek(0)
    return len(seen)


def _request(number: int, line: bytes) -> BatchRequest:
    try:
        request = msgspec.json.decode(line, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = line[:80].decode(errors="replace")
        raise _wrong(number, "line", text, f"a request as JSON: {error}") from None
    if not 1 <= len(request.custom_id) <= MAX_CUSTOM_ID:
        allowed = f"1 to {MAX_CUSTOM_ID} characters"
        raise _wrong(number, "custom_id", request.custom_id, allowed)
    if request.method != "POST":
        raise _wrong(number, "method", request.method, "POST")
    if request.url not in URLS:
        raise _wrong(number, "url", request.url, f"one of {', '.join(URLS)}")
    if request.body.get("stream"):
        raise _wrong(number, "body.stream", request.body["stream"], "false: answers are whole")
    return request


def _wrong(number: int, field: str, value: object, allowed: str) -> InvalidParameter:
    return InvalidParameter(f"line {number}: {field}", value, allowed)


def answer_line(
    request: BatchRequest,
    status: int,
    request_id: str,
    body: object,
    error: Mapping[str, str] | None = None,
) -> bytes:
    """Return a line of the output in OpenAI's form: an answer or an error."""
    answered = {"status_code": status, "request_id": request_id, "body": body}
    content = {
        "id": f"batch_req_{request_id}",
        "custom_id": request.custom_id,
        "response": answered if error is None else None,
        "error": error,
    }
    return msgspec.json.encode(content) + b"\n"


RETRIED = frozenset({408, 429, 500, 502, 503, 504})
"""Statuses after which a request is retried."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts."""
MAX_DEAD = 20
"""Failed requests in a row after which the batch ends."""


class ServerGone(Exception):
    """The server has not answered many requests in a row."""


@dataclass(slots=True)
class Batch:
    """Run over a file."""

    client: httpx.AsyncClient
    output: BinaryIO
    concurrency: int
    max_attempts: int
    on_answer: Callable[[Batch], None] = lambda _: None
    """Called after each answer."""
    answered: int = 0
    failed: int = 0
    """Requests without an answer of 200."""
    tokens: int = 0
    _dead: int = field(default=0)

    async def run(self, requests: Iterator[BatchRequest]) -> None:
        """Send all requests and write answers in order of arrival.

        Raises ServerGone, and errors of reading and writing.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.concurrency):
                    group.create_task(self._work(requests))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None  # the first error ended the others

    async def _work(self, requests: Iterator[BatchRequest]) -> None:
        for request in requests:
            self.output.write(await self._line(request))
            self.on_answer(self)
            if self._dead >= MAX_DEAD:
                raise ServerGone

    async def _line(self, request: BatchRequest) -> bytes:
        request_id = uuid.uuid4().hex
        for attempt in range(1, self.max_attempts + 1):
            is_last, wait = attempt == self.max_attempts, float(2 ** (attempt - 1))
            try:
                answer = await self.client.post(
                    request.url,
                    content=msgspec.json.encode(request.body),
                    headers={"Content-Type": "application/json", "X-Request-Id": request_id},
                )
            except httpx.HTTPError as error:
                if is_last:
                    self.failed += 1
                    self._dead += 1
                    words = str(error) or type(error).__name__
                    problem = {"code": "no_answer", "message": words}
                    return answer_line(request, 0, request_id, None, problem)
            else:
                self._dead = 0
                if is_last or answer.status_code not in RETRIED:
                    return self._read(request, request_id, answer)
                wait = _seconds(answer.headers.get("retry-after"), wait)
            await asyncio.sleep(min(wait, LONGEST_WAIT))
        raise AssertionError("at least one try is made")

    def _read(self, request: BatchRequest, request_id: str, answer: httpx.Response) -> bytes:
        try:
            body: Any = msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            body = answer.text[:10_000]
        if answer.status_code == 200:
            self.answered += 1
            usage = body.get("usage") if isinstance(body, dict) else None
            self.tokens += _generated(usage)
        else:
            self.failed += 1
        return answer_line(request, answer.status_code, request_id, body)


def _generated(usage: Any) -> int:
    if not isinstance(usage, dict):
        return 0
    count = usage.get("completion_tokens") or usage.get("output_tokens") or 0
    return count if isinstance(count, int) else 0


def _seconds(asked: str | None, otherwise: float) -> float:
    """Return the seconds of a Retry-After header, or ``otherwise``."""
    return float(asked) if asked is not None and asked.isdecimal() else otherwise
