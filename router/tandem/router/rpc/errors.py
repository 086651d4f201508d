"""The gRPC status of each exception: the equivalent of its HTTP status."""

from __future__ import annotations

import logging

import grpc

from tandem.protocol.errors import TandemError
from tandem.router.openai.errors import ErrorAnswer, answer_of

logger = logging.getLogger(__name__)
Metadata = tuple[tuple[str, str], ...]


class RpcError(Exception):
    """A call that ends with a status of gRPC's own."""

    def __init__(self, code: grpc.StatusCode, words: str, metadata: Metadata = ()) -> None:
        super().__init__(words)
        self.code = code
        self.metadata = metadata


_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def failure_of(error: Exception) -> RpcError:
    """Return the status of a call that an exception ended."""
    if isinstance(error, RpcError):
        return error
    if isinstance(error, TimeoutError):
        return RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
    if not isinstance(error, TandemError):
        logger.error("a gRPC call failed", exc_info=error)
    answer = answer_of(error)
    code = _STATUSES.get(answer.status, grpc.StatusCode.UNKNOWN)
    return RpcError(code, answer.message, _metadata_of(answer))


def _metadata_of(answer: ErrorAnswer) -> Metadata:
    """Return the field and the code of an error, and the time to retry, if it has them."""
    found = {
        "tandem-error-param": answer.param,
        "tandem-error-code": answer.code,
        "retry-after": answer.headers.get("Retry-After"),
    }
    return tuple((key, _ascii(value)) for key, value in found.items() if value)


def _ascii(text: str) -> str:
    """Return a value that metadata may carry: a client ends the connection at a line break."""
    return text.encode("unicode_escape").decode().strip()
