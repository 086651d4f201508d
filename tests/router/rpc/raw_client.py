"""A client of gRPC whose messages are bytes, and its messages."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import grpc

from tandem.router.api.grpc import tandem_pb2 as pb

SERVICE = "/tandem.v1.Inference/"
GENERATE = SERVICE + "Generate"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 10))
"""Options of a client that has room for 10 bytes of an answer until it reads it."""


class RawClient:
    """A client with a connection of its own."""

    def __init__(self, port: int, options: Iterable[tuple[str, int]] = ()) -> None:
        options = (("grpc.use_local_subchannel_pool", 1), *options)
        self.port = port
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=options)

    def start(
        self,
        *messages: bytes,
        path: str = GENERATE,
        requests: Iterable[bytes] = (),
        timeout: float = 20.0,
        compression: Any = None,
        **metadata: str,
    ) -> Any:
        """Begin a call that sends ``messages``, or all of ``requests``; return the call."""
        call: Any = self.channel.stream_stream(path)
        named = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
        return call(
            iter(messages or requests), timeout=timeout, metadata=named, compression=compression
        )

    def status(self, *messages: bytes, **given: Any) -> tuple[grpc.StatusCode, str]:
        """Return the status of a call, and its words."""
        return status_of(self.start(*messages, **given))

    def close(self) -> None:
        self.channel.close()


def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a call to its end; return its status and words."""
    with suppress(grpc.RpcError):
        for _ in call:
            pass
    return call.code(), call.details()


def asked(**fields: Any) -> bytes:
    return pb.GenerateRequest(prompt="Hi", **fields).SerializeToString()


def texts(messages: Iterable[bytes]) -> str:
    """Return the text in messages of Generate."""
    answers = map(pb.GenerateResponse.FromString, messages)
    return "".join(choice.text for answer in answers for choice in answer.choices)
