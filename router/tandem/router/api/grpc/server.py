"""The gRPC server: its port, its methods with their access, and the status of each call."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import aclosing
from functools import lru_cache, partial
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tandem.router.api.grpc import tandem_pb2 as pb
from tandem.router.api.grpc.call import (
    Call,
    Intake,
    NotRead,
    RpcError,
    failure_of,
)
from tandem.router.api.grpc.inference import Inference
from tandem.router.api.openai.bodies.bounds import CONTAINER_SHARE, SLICE_BYTES, too_many_values
from tandem.router.api.openai.service import Service
from tandem.router.config import RouterConfig
from tandem.router.dispatch.admission import Turns
from tandem.router.http.access import Access, Authorizer
from tandem.router.http.closing import LINGER_SECONDS
from tandem.router.tenant import current_tenant

_WITH_LENGTH = 2
"""Wire type of fields with a length."""
_CONTINUED = bytes(range(128, 256))
_MAX_SHIFT = 63
COUNT_WEIGHT = 11
"""Cost of a counted byte, for ``CpuPool``."""


def may_exceed(num_bytes: int, most: int) -> bool:
    """Return whether ``check_values`` could refuse a message of this size.

    A value takes at least one byte, a message two.
    """
    return num_bytes > most or num_bytes // 2 > most // CONTAINER_SHARE


def check_values(data: bytes, kind: Descriptor, most: int) -> None:
    """Raise HttpProblem (413) for more than ``most`` values, of which a tenth may be messages.

    Raises DecodeError for bytes that are not a message.
    """
    _Counted(most).walk(memoryview(data), kind)


class _Counted:
    """Counters over the values so far."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_values = self._num_messages = 0

    def walk(self, data: memoryview, kind: Descriptor) -> None:
        """Count a message, and those within it."""
        within, at, end = _within(kind), 0, len(data)
        while at < end:
            tag, at = _number(data, at)
            size = 0
            match tag & 7:
                case 0:
                    _, at = _number(data, at)
                case 1:
                    size = 8
                case 5:
                    size = 4
                case way if way == _WITH_LENGTH:
                    size, at = _number(data, at)
                case _:
                    raise DecodeError("a field of no type that messages have")
            if at + size > end:
                raise DecodeError("a field is cut short")
            self._count(1)
            if tag & 7 == _WITH_LENGTH and tag >> 3 in within:
                self._go_in(within[tag >> 3], data[at : at + size])
            at += size

    def _go_in(self, kind: Descriptor | None, data: memoryview) -> None:
        if kind is not None:
            self._num_messages += 1
            if self._num_messages > self._most // CONTAINER_SHARE:
                raise too_many_values("objects and lists", self._most // CONTAINER_SHARE)
            self.walk(data, kind)
            return
        for start in range(0, len(data), SLICE_BYTES):
            part = bytes(data[start : start + SLICE_BYTES])
            self._count(len(part.translate(None, _CONTINUED)))

    def _count(self, more: int) -> None:
        self._num_values += more
        if self._num_values > self._most:
            raise too_many_values("values", self._most)


@lru_cache(maxsize=64)
def _within(kind: Descriptor) -> Mapping[int, Descriptor | None]:
    """Return the fields that hold several values, by number: messages with their type, and None for
    numbers, which may be packed.

    Requests pack no numbers of a fixed length.
    """
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {each.number: each.message_type for each in kind.fields if each.type not in texts}


def _number(data: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data) and shift <= _MAX_SHIFT:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
    raise DecodeError("a number is cut short")


NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MOST_REFLECTED = 100
"""Maximum messages of one call of reflection."""
_MAX_AGE = 1_800.0
"""Maximum age of a connection in seconds; unread calls end with it."""
_MIN_PING_SECONDS = 10.0
"""Minimum seconds between a client's pings while nothing is sent."""
_AT_ONCE = (pb.AbortRequest, pb.GetModelInfoRequest, health_pb2.HealthCheckRequest)
"""Requests that skip the queue of turns: they are cheap, and may end the waits of other calls."""
_Answer = Callable[[Call], Awaitable[None]]


class Server(grpc.GenericRpcHandler):
    """gRPC server in the router's loop."""

    def __init__(
        self, service: Service, config: RouterConfig, authorizer: Authorizer, turns: Turns
    ) -> None:
        self.intake = Intake(config)
        self._service = service
        self._config = config
        self._authorizer = authorizer
        self._turns = turns
        self._methods = self._known_methods()
        self._reflection: Any = reflection.ReflectionServicer(
            (NAME, HEALTH, reflection.SERVICE_NAME)
        )
        self._calls: set[Call] = set()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        config, host = self._config, self._config.host.strip("[]")
        self._server = grpc.aio.server(
            handlers=(self,),
            options=_options(config, self._service.stream_seconds),
            maximum_concurrent_rpcs=config.max_connections,
        )
        address = f"{f'[{host}]' if ':' in host else host}:{config.grpc_port}"
        try:
            self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"gRPC cannot listen on {address}: {error}") from None
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """Accept no more calls, and end running ones after ``grace`` seconds."""
        if self._server is None:
            return
        stopped = asyncio.ensure_future(self._server.stop(grace + LINGER_SECONDS))
        await asyncio.wait({stopped}, timeout=grace)
        for call in list(self._calls):
            call.end(RpcError(grpc.StatusCode.UNAVAILABLE, "the server is shutting down"))
        await stopped

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of any method; unknown ones require a key, too."""
        handle = partial(self._handle, handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(handle)

    async def _handle(self, path: str, _: Any, context: Any) -> None:
        call = Call(context, path, self.intake)
        self._calls.add(call)
        try:
            failure = await self._answer(call)
        finally:
            self._calls.discard(call)
            call.close()
        if failure is not None:
            await call.abort(failure)

    async def _answer(self, call: Call) -> RpcError | None:
        try:
            await self._method(call)(call)
        except (asyncio.CancelledError, grpc.aio.InternalError):
            if call.failure is None or isinstance(call.failure, NotRead):
                self._count_cancelled(call)
            if call.failure is None:
                raise asyncio.CancelledError from None  # gRPC logs other exceptions
            return call.failure
        except Exception as error:
            return failure_of(error)
        return None

    def _count_cancelled(self, call: Call) -> None:
        """Count a request whose client has left before its deadline."""
        is_late = call.deadline is not None and asyncio.get_running_loop().time() >= call.deadline
        if call.path.startswith(f"/{NAME}/") and not is_late:
            self._service.metrics.request_cancelled()

    def _method(self, call: Call) -> _Answer:
        """Return the function that answers a call, and set its tenant. Raises HttpProblem or
        RpcError.
        """
        access, method = self._methods.get(call.path, (Access.CLIENT, None))
        headers = {
            name.encode(): value if isinstance(value, bytes) else value.encode()
            for name, value in call.metadata.items()
        }
        call.tenant = self._authorizer.check(access, headers)
        current_tenant.set(call.tenant)
        if method is None:
            raise RpcError(grpc.StatusCode.UNIMPLEMENTED, f"no method {call.path[:256]!r}")
        return method

    def _known_methods(self) -> dict[str, tuple[Access, _Answer]]:
        inference = Inference(self._service)
        found: dict[str, tuple[Access, _Answer]] = {
            f"/{HEALTH}/Check": (
                Access.OPEN,
                partial(self._unary, self._check, health_pb2.HealthCheckRequest),
            ),
            f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": (Access.CLIENT, self._reflect),
            f"/{NAME}/Generate": (Access.CLIENT, partial(self._stream, inference.generate)),
        }
        for name, method, request in (
            ("Embed", inference.embed, pb.EmbedRequest),
            ("Score", inference.score, pb.ScoreRequest),
            ("Tokenize", inference.tokenize, pb.TokenizeRequest),
            ("Abort", inference.abort, pb.AbortRequest),
            ("GetModelInfo", inference.get_model_info, pb.GetModelInfoRequest),
        ):
            found[f"/{NAME}/{name}"] = Access.CLIENT, partial(self._unary, method, request)
        return found

    async def _unary(
        self,
        method: Callable[[Any, Call], Awaitable[Message]],
        request: type[Message],
        call: Call,
    ) -> None:
        response = await method(await self._receive(request, call), call)
        await call.write(response.SerializeToString())

    async def _stream(
        self, method: Callable[[Any, Call], AsyncGenerator[bytes, None]], call: Call
    ) -> None:
        asked, seconds = await self._receive(pb.GenerateRequest, call), self._service.stream_seconds
        async with asyncio.timeout(seconds), aclosing(method(asked, call)) as messages:
            async for message in messages:
                await call.write(message)

    async def _reflect(self, call: Call) -> None:
        num_messages = 0
        async with asyncio.timeout(self._service.stream_seconds):
            while (data := await call.receive()) is not None:
                num_messages += 1
                if num_messages > MOST_REFLECTED:
                    words = f"a call of reflection has at most {MOST_REFLECTED} messages"
                    raise RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, words)
                await self._turns.take()
                asked = await self._parse(reflection_pb2.ServerReflectionRequest, data)
                call.let_go()
                for answer in self._reflection.ServerReflectionInfo(iter((asked,)), None):
                    await call.write(answer.SerializeToString())

    async def _check(
        self, request: health_pb2.HealthCheckRequest, _: Call
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", NAME):
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:256]!r}")
        states = health_pb2.HealthCheckResponse
        served = self._service.is_served()
        return states(status=states.SERVING if served else states.NOT_SERVING)

    async def _receive(self, request: type[Message], call: Call) -> Any:
        data = await call.receive(only=True)
        if request not in _AT_ONCE:
            await self._turns.take()
        return await self._parse(request, data or b"")

    async def _parse(self, request: type[Message], data: bytes) -> Any:
        most = self._service.bounds.json_values
        counts = may_exceed(len(data), most)
        size = COUNT_WEIGHT * len(data) if counts else len(data)
        run = self._service.llm.cpu_pool.run
        return await run(size, _parsed, request, data, most if counts else None)


def _options(config: RouterConfig, stream_seconds: float) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", config.max_body_bytes),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.max_metadata_size", config.max_header_bytes),
        ("grpc.absolute_max_metadata_size", config.max_header_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        (
            "grpc.max_concurrent_streams",
            config.max_connections_per_client or config.max_connections,
        ),
        ("grpc.http2.bdp_probe", 0),  # windows of calls that receive nothing do not grow
        ("grpc.server_handshake_timeout_ms", _ms(config.header_timeout)),
        ("grpc.max_connection_idle_ms", _ms(config.keep_alive_timeout)),
        ("grpc.max_connection_age_ms", _ms(_MAX_AGE)),
        ("grpc.max_connection_age_grace_ms", _ms(stream_seconds)),
        ("grpc.keepalive_time_ms", _ms(config.write_timeout)),
        ("grpc.keepalive_timeout_ms", _ms(config.write_timeout)),
        ("grpc.http2.max_pings_without_data", 0),  # any number
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(_MIN_PING_SECONDS)),
    )


def _ms(seconds: float) -> int:
    return max(1, min(int(1000 * seconds), 2**31 - 1))


def _parsed(request: type[Message], data: bytes, most: int | None) -> Any:
    """Parse a message; None for ``most`` sets no bound."""
    try:
        if most is not None:
            kind: Any = request.DESCRIPTOR
            check_values(data, kind, most)
        return request.FromString(data)
    except DecodeError:
        words = "the message is not of the method's type"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, words) from None
