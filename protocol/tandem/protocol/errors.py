"""Errors of requests, shared by router and workers.

TandemError
├── InvalidParameter     the client sent a value that is not allowed (HTTP 400)
├── RequestRefused       a worker would not start the request; nothing was done
├── RequestFailed        an attempt ended; the router may start another
└── WireError            bytes that are not a frame of this protocol
"""

from collections.abc import Mapping
from enum import StrEnum
from itertools import islice
from types import MappingProxyType
from typing import Any

import msgspec

_SHOWN_CHARS = 120
_SHOWN_DEPTH = 3
_SHOWN_BITS = 256


class RefusalCode(StrEnum):
    """Why a worker did not start a request. A refusal never counts against its health."""

    INVALID = "invalid"
    """The request is invalid for every worker (HTTP 400)."""
    NEVER_FITS = "never_fits"
    """The request is too long for this worker or a hand-off (HTTP 400 if for all workers)."""
    UNSUPPORTED = "unsupported"
    """This worker does not support the request (HTTP 400 if no other does)."""
    CAPACITY = "capacity"
    """The queue or the lease quota is full (HTTP 503)."""
    DRAINING = "draining"
    """The worker is shutting down (HTTP 503)."""
    ASLEEP = "asleep"
    """The worker is in sleep mode (HTTP 503)."""
    DUPLICATE = "duplicate"
    """The key is already in use."""
    PEER_UNKNOWN = "peer_unknown"
    """The hand-off's peer has no live link to this worker."""
    FINGERPRINT = "fingerprint"
    """The peer's KV has another layout, revision or dtype."""
    EXPIRED = "expired"
    """The deadline passed before the request could start."""


class FailCause(StrEnum):
    """Why an attempt ended without finishing."""

    PEER = "peer"
    """The hand-off's peer or its link was lost."""
    TIMEOUT = "timeout"
    """No progress or no answer within the time limit."""
    GONE = "gone"
    """The prefill worker had freed the KV before it was fetched."""
    IDENTITY = "identity"
    """KV of another block, position, token or prompt arrived."""
    DIGEST = "digest"
    """The bytes of the KV differ from those sent."""
    CAPACITY = "capacity"
    """There was no memory to continue."""
    DRAINING = "draining"
    """The worker shut down before the end."""
    ASLEEP = "asleep"
    """The worker was put to sleep before the end."""
    WORKER_LOST = "worker_lost"
    """The worker or its link was lost, or there is no worker."""
    INTERNAL = "internal"
    """A fault of the worker; its log has the reason."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Refusal of a request by a worker, sent before any work was done."""

    code: RefusalCode
    message: str
    param: str | None = None


class TandemError(Exception):
    """Root of all errors of Tandem."""

    exit_status = 1
    """Exit status of a command; 2 if the user's input is wrong."""
    answers: Mapping[int, Any] = MappingProxyType({})
    """Answers by prompt index of an offline batch that this error ended."""


def shown(value: object) -> str:
    """Return ``repr(value)`` cut to 120 characters, in constant time."""
    text = repr(_cut(value, _SHOWN_DEPTH))
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _cut(value: object, depth: int) -> object:
    if isinstance(value, str | bytes):
        return value[:_SHOWN_CHARS]
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1}..."
    if not isinstance(value, list | tuple | dict):
        return value
    if depth == 0:
        return "..." if value else value
    if isinstance(value, dict):
        few = islice(value.items(), _SHOWN_CHARS // 3)
        return {_cut(key, depth - 1): _cut(each, depth - 1) for key, each in few}
    first = [_cut(each, depth - 1) for each in value[: _SHOWN_CHARS // 3]]
    return tuple(first) if isinstance(value, tuple) else first


class InvalidParameter(TandemError, ValueError):
    """A value that is not allowed; names the field, the value, what is allowed."""

    exit_status = 2

    def __init__(self, param: str, value: object, allowed: str) -> None:
        self.param = param
        self.value = value
        self.allowed = allowed
        super().__init__(f"{param}: {shown(value)} is not allowed; {allowed}")


class RequestRefused(TandemError):
    """No worker would start the request. Raised by ``EngineCoreClient.stream``."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(refusal.message)


class RequestFailed(TandemError):
    """The request ended without an answer. Raised by ``EngineCoreClient.stream``.

    ``reasons``: cause and message of each attempt.
    """

    def __init__(self, cause: FailCause, message: str, reasons: tuple[str, ...] = ()) -> None:
        self.cause = cause
        self.reasons = reasons
        super().__init__(message)


class DeadlinePassed(RequestFailed):
    """The request's deadline passed."""


class WireError(TandemError):
    """Bytes that are not a frame of this protocol; they are counted and dropped."""
