"""The size of a JSON body: values and depth, counted in its bytes before it is parsed.

A parser makes an object of every value in one call and holds the interpreter meanwhile. So a body
of few bytes may cost much: `[[],[],...`. This count goes through slices, and costs a hundredth.
"""

from __future__ import annotations

from tandem.router.openai.errors import ErrorAnswer, HttpProblem

SLICE_BYTES = 1 << 18
CONTAINER_SHARE = 10
"""Allowed values for each allowed object or list: those cost more."""
_NOT_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")


def check_shape(body: bytes, *, max_values: int, max_depth: int) -> None:
    """Raise HttpProblem (413, or 400 for the depth) when the body holds too much.

    The parser decides whether it is JSON at all.
    """
    counted = _Counted(max_values, max_depth)
    start = 0
    while start < len(body):
        part = body[start : start + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # never between a backslash and its letter
            part = body[start : start + len(part) + 1]
        start += len(part)
        counted.take(part)


class _Counted:
    """Counters over the bytes so far."""

    def __init__(self, max_values: int, max_depth: int) -> None:
        self._max_values = max_values
        self._max_depth = max_depth
        self._num_values = 1
        self._num_containers = 0
        self._depth = 0
        self._in_text = False

    def take(self, part: bytes) -> None:
        if b"\\" in part:
            part = part.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        pieces = part.split(b'"')
        outside = b"".join(pieces[int(self._in_text) :: 2])
        if len(pieces) % 2 == 0:
            self._in_text = not self._in_text
        brackets = outside.translate(None, _NOT_BRACKETS)
        opened = brackets.count(b"[") + brackets.count(b"{")
        self._num_containers += opened
        self._num_values += opened + outside.count(b",") + outside.count(b":")
        self._check_counts()
        self._go_down(brackets)

    def _check_counts(self) -> None:
        most = self._max_values
        if self._num_values > most:
            raise too_many("values", most)
        if self._num_containers > most // CONTAINER_SHARE:
            raise too_many("objects and lists", most // CONTAINER_SHARE)

    def _go_down(self, brackets: bytes) -> None:
        depth = self._depth
        for each in brackets:
            depth += 1 if each in b"[{" else -1
            if depth > self._max_depth:
                raise _too_deep(self._max_depth)
        self._depth = depth


def too_many(what: str, limit: int) -> HttpProblem:
    """Return the answer 413 for a body with more than it may hold."""
    return HttpProblem(
        ErrorAnswer(
            status=413,
            message=f"The body holds more than {limit} {what}",
            type="invalid_request_error",
            code="request_too_large",
        )
    )


def _too_deep(limit: int) -> HttpProblem:
    return HttpProblem(
        ErrorAnswer(
            status=400,
            message=f"The body nests objects and lists more than {limit} deep",
            type="invalid_request_error",
            code="body_too_deep",
        )
    )
