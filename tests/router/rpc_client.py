"""A client of gRPC that knows nothing but what the server's reflection tells, as grpcurl."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "tandem.v1.Inference"


class RpcClient:
    """Calls methods by their names, with messages as JSON."""

    def __init__(self, port: int, key: str | None = None, host: str = "127.0.0.1") -> None:
        self.channel = grpc.insecure_channel(f"{host}:{port}")
        self.metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        channel = grpc.intercept_channel(self.channel, _WithMetadata(self.metadata))
        self._pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))

    def call(self, method: str, timeout: float = 20.0, **fields: Any) -> Any:
        """The answer; a list where the method streams."""
        if method == "Generate":
            return list(self.start(method, timeout, **fields))
        return self._json(self.start(method, timeout, **fields))

    def start(self, method: str, timeout: float = 20.0, **fields: Any) -> Any:
        """The raw answer, or an iterator of answers as JSON."""
        described = self._pool.FindServiceByName(SERVICE).methods_by_name[method]
        asked = json_format.ParseDict(fields, GetMessageClass(described.input_type)())
        path = f"/{SERVICE}/{method}"
        answer = GetMessageClass(described.output_type).FromString
        make = self.channel.unary_stream if described.server_streaming else self.channel.unary_unary
        call = make(path, type(asked).SerializeToString, answer)
        result = call(asked, timeout=timeout, metadata=self.metadata)
        return _Stream(result, self._json) if described.server_streaming else result

    def close(self) -> None:
        self.channel.close()

    @staticmethod
    def _json(message: Any) -> Any:
        return json_format.MessageToDict(message, preserving_proto_field_name=True)


class _Stream:
    """Messages as JSON; ``call`` is gRPC's own."""

    def __init__(self, call: Any, read: Any) -> None:
        self.call, self._read = call, read

    def __iter__(self) -> Any:
        return (self._read(each) for each in self.call)


class _WithMetadata(grpc.StreamStreamClientInterceptor):
    """Puts a key on the calls of reflection."""

    def __init__(self, metadata: Any) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)
