"""The gRPC server: what listens, who may call, and how errors are told.

It speaks HTTP/2 itself, on the router's loop (``http2``, ``call``): in grpcio's server a message
costs two threads, two wakes and a round through its core, more than all that the router does else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from itertools import islice
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import SERVICE_NAME as HEALTH
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tandem.protocol.errors import TandemError
from tandem.router.access import Access, Authorizer
from tandem.router.admission.turns import Turns
from tandem.router.closing import LINGER_SECONDS
from tandem.router.config import RouterConfig
from tandem.router.held_bytes import HeldBytes
from tandem.router.http_guard import SPARE_CONNECTIONS
from tandem.router.openai.errors import answer_of
from tandem.router.openai.service import Service
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.call import Call, NotRead
from tandem.router.rpc.calls import Aborted
from tandem.router.rpc.errors import RpcError, metadata_of, status_of
from tandem.router.rpc.http2 import Connection
from tandem.router.rpc.inference import Inference
from tandem.router.rpc.values import COUNT_WEIGHT, check_values, may_exceed
from tandem.router.tenant import current_tenant

logger = logging.getLogger(__name__)

NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
_COUNTED = f"/{NAME}/"
"""Methods that are requests begin so: who has read of reflection what it wants gives it up."""
_Answer = Callable[[Call], Awaitable[None]]


class _Request(Protocol):
    DESCRIPTOR: Any

    @staticmethod
    def FromString(data: bytes, /) -> Any:  # protobuf's name
        """The message of its bytes."""


class _Message(Protocol):
    def SerializeToString(self) -> bytes:  # protobuf's name
        """Its bytes."""


_AnyMessage = TypeVar("_AnyMessage", bound=_Message)


class Server:
    """Listens from ``start`` to ``stop``; connections and calls are counted."""

    def __init__(
        self, service: Service, config: RouterConfig, authorizer: Authorizer, turns: Turns
    ) -> None:
        self.max_message_bytes = config.max_body_bytes
        self.max_header_bytes = config.max_header_bytes
        self.max_headers = config.max_headers
        self.max_calls = config.max_connections_per_client or config.max_connections
        self.held = HeldBytes(config.max_bodies_bytes)
        self.header_seconds = config.header_timeout
        self.write_seconds = config.write_timeout
        self._config = config
        self._authorizer = authorizer
        self._methods = _methods(service, config, turns)
        self._gone = service.metrics.request_cancelled
        self._connections: set[Connection] = set()
        self._calls: dict[asyncio.Task[None], Call] = {}
        self._stopped: set[Call] = set()
        self._all_gone = asyncio.Event()
        """Set as the last connection goes."""
        self._listening: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen where HTTP does, on ``grpc_port``. Raises OSError."""
        loop = asyncio.get_running_loop()
        host, port = self._config.host, self._config.grpc_port
        self._listening = await loop.create_server(lambda: Connection(self), host, port)

    async def stop(self, grace: float | None) -> None:
        """Take no more calls, and end those that are not finished after ``grace`` seconds."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        for connection in list(self._connections):
            connection.leave()
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for task, call in list(self._calls.items()):
            self._stopped.add(call)
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=self.write_seconds)
        if self._connections:  # what they are told last is lost with the process
            self._all_gone.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), 2 * LINGER_SECONDS)

    def opened(self, connection: Connection) -> bool:
        """Count it; where all places are taken, one that has ended or has no call makes room. It
        may take the last words with it, but not where too many do so already."""
        over = len(self._connections) + 1 - self._config.max_connections
        ended = (each for each in self._connections if each.is_lingering())
        for each in list(islice(ended, max(over, 0))):
            each.abort()
            self._connections.discard(each)  # else it would make room for the next one, too
            over -= 1
        if over > 0:  # those that are over have been asked before, and their last words not taken
            idle = next((each for each in self._connections if each.is_idle()), None)
            if idle is None:
                return False
            idle.leave()
            if over > SPARE_CONNECTIONS + 1:
                idle.abort()
        self._connections.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        """It is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._all_gone.set()

    def begin(self, call: Call) -> bool:
        """Answer a call in a task of its own; False where too many run."""
        if len(self._calls) >= self._config.max_connections:
            return False
        task = call.task = asyncio.create_task(self._answer(call), name="rpc")
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        return True

    async def _answer(self, call: Call) -> None:
        try:
            async with asyncio.timeout_at(call.deadline):
                await self._method(call)(call)
        except asyncio.CancelledError:
            if call not in self._stopped:  # by Abort while it waited to write, or the client left
                if not call.is_open:
                    self._left(call)
                call.finish(grpc.StatusCode.ABORTED, "the call was aborted")
                raise
            self._stopped.discard(call)
            call.finish(grpc.StatusCode.UNAVAILABLE, "the server stops")
        except Exception as error:
            if isinstance(error, NotRead):
                self._left(call)
            _tell(error, call)
        else:
            call.finish(grpc.StatusCode.OK)

    def _left(self, call: Call) -> None:
        """Its client left before the end, or does not read it: counted as HTTP's are."""
        if call.path.startswith(_COUNTED):
            self._gone()

    def _method(self, call: Call) -> _Answer:
        """Return what answers a call, and set its tenant. Raises HttpProblem for a caller that may
        not use the method, and RpcError for one that does not exist."""
        access, method = self._methods.get(call.path, (Access.CLIENT, None))
        headers = {name.encode(): value.encode() for name, value in call.metadata.items()}
        call.tenant = self._authorizer.check(access, headers)
        current_tenant.set(call.tenant)
        call.belongs_to(call.tenant.id)
        if method is None:
            raise RpcError(grpc.StatusCode.UNIMPLEMENTED, f"no method {call.path[:256]!r}")
        encoding = call.metadata.get("grpc-encoding", "identity")
        if encoding != "identity":
            words = f"grpc-encoding: {encoding[:64]!r} is not allowed; identity is"
            raise RpcError(grpc.StatusCode.UNIMPLEMENTED, words)
        return method


def make_server(
    service: Service, config: RouterConfig, authorizer: Authorizer, turns: Turns
) -> Server:
    """A server that is not started; its calls take ``turns`` with the requests of HTTP."""
    return Server(service, config, authorizer, turns)


def _methods(
    service: Service, config: RouterConfig, turns: Turns
) -> dict[str, tuple[Access, _Answer]]:
    """Return the methods by path, each with its access class."""
    inference, reads = Inference(service), _Reads(service, config.body_timeout)
    generate = _streaming(inference.generate, reads, service.stream_seconds, turns)
    found = {f"/{NAME}/Generate": (Access.CLIENT, generate)}
    for name, method, request, turn in (
        ("Embed", inference.embed, pb.EmbedRequest, turns),
        ("Score", inference.score, pb.ScoreRequest, turns),
        ("Tokenize", inference.tokenize, pb.TokenizeRequest, turns),
        ("Abort", inference.abort, pb.AbortRequest, None),
        ("GetModelInfo", inference.get_model_info, pb.GetModelInfoRequest, None),
    ):
        found[f"/{NAME}/{name}"] = Access.CLIENT, _unary(method, request, reads, turn)
    health = _unary(_health(service), health_pb2.HealthCheckRequest, reads)
    found[f"/{HEALTH}/Check"] = Access.OPEN, health
    described = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
    found[described] = Access.CLIENT, _reflecting(reads, service.stream_seconds, turns)
    return found


def _health(
    service: Service,
) -> Callable[[Any, Call], Awaitable[health_pb2.HealthCheckResponse]]:
    """Serving while a decode worker is up, for the whole server and for its one service."""

    async def check(
        request: health_pb2.HealthCheckRequest, _: Call
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", NAME):
            raise RpcError(grpc.StatusCode.NOT_FOUND, f"no service {request.service[:256]!r}")
        states = health_pb2.HealthCheckResponse
        served = service.is_served()
        return states(status=states.SERVING if served else states.NOT_SERVING)

    return check


def _reflecting(reads: _Reads, seconds: float, turns: Turns) -> _Answer:
    """Answer what there is, message by message. Each takes a turn: a client may send thousands at
    once."""
    servicer: Any = reflection.ReflectionServicer((NAME, HEALTH, reflection.SERVICE_NAME))

    async def reflect(call: Call) -> None:
        async with asyncio.timeout(seconds):
            while (data := await call.receive()) is not None:
                await turns.take()
                asked = await reads.parsed(reflection_pb2.ServerReflectionRequest, data)
                call.let_go()
                for answer in servicer.ServerReflectionInfo(iter((asked,)), None):
                    call.write(answer.SerializeToString())
                    await call.drained()

    return reflect


class _Reads:
    """How messages come to be read: within a time, and large ones beside the loop."""

    def __init__(self, service: Service, seconds: float) -> None:
        self._service = service
        self._seconds = seconds

    async def asked(self, request: type[_Request], call: Call, turns: Turns | None = None) -> Any:
        """The one message of a request, read when it has its turn. Raises RpcError, and
        HttpProblem for one that holds too much."""
        try:
            async with asyncio.timeout(self._seconds):
                data = await call.receive()
                more = data is not None and await call.receive()
        except TimeoutError:
            words = f"the request did not come within {self._seconds:g} s"
            raise RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, words) from None
        if data is None or more is not None:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "the method takes one message")
        if turns is not None:
            await turns.take()
        return await self.parsed(request, data)

    async def parsed(self, request: type[_Request], data: bytes) -> Any:
        """The message of some bytes, within the bounds that a body has."""
        most = self._service.bounds.json_values
        counts = may_exceed(len(data), most)
        size = COUNT_WEIGHT * len(data) if counts else len(data)
        return await self._service.llm.beside.run(
            size, _parsed, request, data, most if counts else None
        )


def _parsed(request: type[_Request], data: bytes, most: int | None) -> Any:
    """``most``: values that it may hold; None where nobody need count."""
    try:
        if most is not None:
            check_values(data, request.DESCRIPTOR, most)
        return request.FromString(data)
    except DecodeError:
        words = "the message is not of the method's type"
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, words) from None


def _unary(
    method: Callable[[Any, Call], Awaitable[_AnyMessage]],
    request: type[_Request],
    reads: _Reads,
    turns: Turns | None = None,
) -> _Answer:
    """One message for one."""

    async def answer(call: Call) -> None:
        told = await method(await reads.asked(request, call, turns), call)
        call.write(told.SerializeToString())
        await call.drained()

    return answer


def _streaming(
    method: Callable[[Any, Call], AsyncGenerator[bytes, None]],
    reads: _Reads,
    seconds: float,
    turns: Turns,
) -> _Answer:
    """A stream, which is written within ``seconds``, its client's slowness included."""

    async def stream(call: Call) -> None:
        asked = await reads.asked(pb.GenerateRequest, call, turns)
        async with asyncio.timeout(seconds), aclosing(method(asked, call)) as messages:
            async for message in messages:
                if not call.write(message):
                    await call.drained()

    return stream


def _tell(error: Exception, call: Call) -> None:
    """End a call with an error."""
    match error:
        case RpcError():
            call.finish(error.code, str(error), error.metadata)
            return
        case Aborted():
            call.finish(grpc.StatusCode.ABORTED, str(error))
            return
        case TimeoutError():
            words = "the deadline has passed"
            call.finish(grpc.StatusCode.DEADLINE_EXCEEDED, words)
            return
    if not isinstance(error, TandemError):
        logger.error("a gRPC call failed", exc_info=error)
    answer = answer_of(error)
    call.finish(status_of(answer), answer.message, metadata_of(answer))
