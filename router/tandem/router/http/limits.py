"""Limits of an HTTP connection, and the errors beyond them in OpenAI's shape."""

from __future__ import annotations

from dataclasses import dataclass

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tandem.router.http.errors import ErrorAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of one connection, and of all together."""

    head_bytes: int = 64 << 10
    headers: int = 128
    head_seconds: float = 10.0
    body_seconds: float = 60.0
    unwanted_seconds: float = 5.0
    """Seconds for the rest of a body whose request has its answer."""
    unwanted_bytes: int = 64 << 20
    """Bytes of such a rest after the connection ends: many clients read nothing before that."""
    write_seconds: float = 30.0
    connections: int = 4096
    connections_per_client: int = 0
    """Connections per address; 0 is any number, since behind a proxy all have the same address."""


def written(answer: ErrorAnswer) -> bytes:
    """Return the bytes of the answer, the last of its connection."""
    body = answer.body
    lines = [STATUS_LINE[answer.status], b"content-type: application/json\r\n"]
    lines += [
        f"{name}: {value}\r\n".encode()
        for name, value in answer.headers.items()
        if name.lower() != "connection"
    ]
    lines += [b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body), body]
    return b"".join(lines)


def head_too_large(limit: str) -> ErrorAnswer:
    """Return the answer 431."""
    return ErrorAnswer(
        status=431,
        message=f"The request's head is larger than {limit}",
        type="invalid_request_error",
        code="head_too_large",
    )


def malformed(message: str) -> ErrorAnswer:
    """Return the answer 400."""
    return ErrorAnswer(status=400, message=message, type="invalid_request_error")


def head_too_slow(seconds: float) -> ErrorAnswer:
    """Return the answer 408."""
    return ErrorAnswer(
        status=408,
        message=f"The request's head was not received within {seconds:g} s",
        type="invalid_request_error",
        code="request_timeout",
    )


def crowded(why: str) -> ErrorAnswer:
    """Return the answer 503."""
    return ErrorAnswer(
        status=503,
        message=f"The router is full: {why}",
        type="server_error",
        code="overloaded",
        headers={"Retry-After": "2", "Connection": "close"},
    )
