"""The gRPC server: what listens, who may call, and how errors are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection

from tandem.protocol.errors import TandemError
from tandem.router.config import RouterConfig
from tandem.router.middleware.auth import KnownKeys
from tandem.router.openai.errors import answer_of, not_authorized
from tandem.router.openai.service import Service
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.calls import Aborted
from tandem.router.rpc.errors import metadata_of, status_of
from tandem.router.rpc.inference import Inference

logger = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_OPEN = f"/{HEALTH}/"
"""Methods that ask for no key begin so."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Lets those call who have a key."""

    def __init__(self, keys: KnownKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Go on, or refuse."""
        is_open = handler_call_details.method.startswith(_OPEN)
        if is_open or self._keys.allow(_headers(handler_call_details)):
            return await continuation(handler_call_details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


def _headers(details: grpc.HandlerCallDetails) -> dict[bytes, bytes]:
    metadata = details.invocation_metadata or ()
    return {
        key.encode(): value if isinstance(value, bytes) else value.encode()
        for key, value in metadata
    }


async def _refuse(request: object, context: Context) -> None:
    answer = not_authorized()
    await context.abort(status_of(answer), answer.message, metadata_of(answer))


def make_server(service: Service, config: RouterConfig, keys: KnownKeys | None) -> grpc.aio.Server:
    """A server that is not started; it listens where HTTP does, on ``grpc_port``."""
    server = grpc.aio.server(
        interceptors=() if keys is None else (KeyInterceptor(keys),),
        maximum_concurrent_rpcs=config.max_connections,
        options=[
            ("grpc.max_receive_message_length", config.max_body_bytes),
            ("grpc.max_metadata_size", config.max_header_bytes),
            *_streams(config.max_connections_per_client),
            ("grpc.so_reuseport", 0),
        ],
    )
    inference = Inference(service)
    handlers: dict[str, Handler] = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            _streaming(inference.generate, service.stream_seconds),
            request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
    }
    for name, method, request in (
        ("Embed", inference.embed, pb.EmbedRequest),
        ("Score", inference.score, pb.ScoreRequest),
        ("Tokenize", inference.tokenize, pb.TokenizeRequest),
        ("Abort", inference.abort, pb.AbortRequest),
        ("GetModelInfo", inference.get_model_info, pb.GetModelInfoRequest),
    ):
        handlers[name] = grpc.unary_unary_rpc_method_handler(
            _answering(method),
            request_deserializer=request.FromString,
            response_serializer=_serialized,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(_Health(service), server)
    reflection.enable_server_reflection((NAME, HEALTH, reflection.SERVICE_NAME), server)
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.add_insecure_port(f"{host}:{config.grpc_port}")
    return server


def _streams(most: int) -> tuple[tuple[str, int], ...]:
    """As many calls of one connection as connections of one client; 0 is no bound."""
    return (("grpc.max_concurrent_streams", most),) if most else ()


class _Health(health_pb2_grpc.HealthServicer):
    """Serving while a decode worker is up, for the whole server and for its one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Check(  # gRPC's name
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        """The state now."""
        if request.service not in ("", NAME):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:256]!r}")
        states = health_pb2.HealthCheckResponse
        served = self._service.is_served()
        return states(status=states.SERVING if served else states.NOT_SERVING)


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _answering(
    method: Callable[[Any, Context], Awaitable[Any]],
) -> Callable[[Any, Context], Awaitable[Any]]:
    """A method whose errors are statuses."""

    async def answer(request: Any, context: Context) -> Any:
        try:
            return await method(request, context)
        except Exception as error:
            await _tell(error, context)

    return answer


def _streaming(
    method: Callable[[Any, Context], AsyncGenerator[Any, None]], seconds: float
) -> Callable[[Any, Context], Awaitable[None]]:
    """The same of a stream, which is written within ``seconds``, its client's slowness included."""

    async def stream(request: Any, context: Context) -> None:
        try:
            async with asyncio.timeout(seconds):
                async with aclosing(method(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)
        except Exception as error:
            await _tell(error, context)

    return stream


async def _tell(error: Exception, context: Context) -> None:
    """End a call with an error. Raises, as gRPC wants it."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, Aborted):
        await context.abort(grpc.StatusCode.ABORTED, str(error))
    if isinstance(error, TimeoutError):
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the stream was read too slowly")
    if not isinstance(error, TandemError):
        logger.error("a gRPC call failed", exc_info=error)
    answer = answer_of(error)
    await context.abort(status_of(answer), answer.message, metadata_of(answer))
