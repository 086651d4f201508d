"""Lines of a batch file: a request each, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from tandem.protocol.errors import InvalidParameter

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/v1/rerank", "/score", "/rerank", "/pooling", "/classify"),
)
MAX_LINE_BYTES = 32 << 20
MAX_CUSTOM_ID = 512


class BatchRequest(msgspec.Struct, frozen=True):
    """One line."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def read_lines(source: BinaryIO) -> Iterator[BatchRequest]:
    """Yield a file's requests, without blank lines. Raises InvalidParameter that names the line."""
    number = 0
    while line := source.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise _wrong(number, "line", f"{len(line)} bytes", f"at most {MAX_LINE_BYTES}")
        if line.strip():
            yield _request(number, line)


def check_lines(source: BinaryIO) -> int:
    """Return the number of requests of a file, and seek to its start again. Raises InvalidParameter
    for the first that cannot be sent."""
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
    """Return a line of the output in OpenAI's form: the server's answer, or the error."""
    answered = {"status_code": status, "request_id": request_id, "body": body}
    content = {
        "id": f"batch_req_{request_id}",
        "custom_id": request.custom_id,
        "response": answered if error is None else None,
        "error": error,
    }
    return msgspec.json.encode(content) + b"\n"
