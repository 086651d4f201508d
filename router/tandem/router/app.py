"""The router, composed: links, dispatch, text and HTTP in one process and event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from tandem.link.liveness import LinkTimes
from tandem.link.sockets import raise_descriptor_limit
from tandem.llm.async_llm import AsyncLLM
from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.protocol.ids import new_incarnation
from tandem.protocol.keys import KeyRing
from tandem.router.api.admin import (
    administration,
    debugging,
    ops,
    sleeping,
)
from tandem.router.api.admin import (
    document as documentation,
)
from tandem.router.api.admin.document import document, paths_of_workers
from tandem.router.api.anthropic import messages
from tandem.router.api.openai import chat, completions, models, pooled, tokenize
from tandem.router.api.openai.answers.sse import ClientGone, KeepAlives
from tandem.router.api.openai.bodies.bounds import RequestBounds
from tandem.router.api.openai.bodies.embeds import EmbedsIntake
from tandem.router.api.openai.bodies.hints import UnknownFields
from tandem.router.api.openai.responses import create as responses
from tandem.router.api.openai.responses import store as stored_responses
from tandem.router.api.openai.responses.store import ResponseStore
from tandem.router.api.openai.service import Service
from tandem.router.api.stopping import Ending, Stopping
from tandem.router.config import RouterConfig
from tandem.router.dispatch.admission import AdmissionLimits, AdmissionQueue, Turns
from tandem.router.dispatch.dispatcher import Dispatcher
from tandem.router.dispatch.explain import DispatchLimits
from tandem.router.dispatch.fleet import Fleet
from tandem.router.endpoints import Endpoint
from tandem.router.http.access import Access, Authorizer, Dispatch, RouteTable
from tandem.router.http.errors import ErrorAnswer, answer_of, error_body
from tandem.router.http.held_bytes import BodyLimit
from tandem.router.http.middleware import (
    Authorization,
    Canary,
    InTurn,
    Origins,
    OwnPagesOnly,
    RootPath,
    Trace,
    Unexpected,
    cors_options,
)
from tandem.router.http.shared_answers import SharedAnswers
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.fleet_view import LiveFleet, register_link_series
from tandem.router.observe.gauges import RouterRates, register_gauges
from tandem.router.observe.timeline.recorder import Recorder
from tandem.router.observe.ui import page
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.router.server import RpcServer, make_server, paced
from tandem.router.tenant import salted, tenant_id
from tandem.router.workers.discovery import (
    KubernetesDiscovery,
    StaticDiscovery,
    own_namespace,
)
from tandem.router.workers.pool import WorkerPool
from tandem.text.isolated_templates import IsolatedTemplates
from tandem.text.parsers.model import ModelParsers
from tandem.text.tokenizer import Tokenizer
from tandem.tracing.spans import Spans

logger = logging.getLogger(__name__)

FIND_AGAIN = 5.0
"""Seconds until a failed discovery starts again."""
SLOW_READER = 60.0
"""Seconds after a request's deadline for its client to read the rest."""


SWITCH_INTERVAL = 0.0002
"""Maximum seconds for which a computing thread delays the loop."""

_CALLED_BY_CANARY = frozenset(
    {
        completions.create_completion,
        pooled.create_embedding,
        pooled.classify,
        pooled.score,
        debugging.debug_fleet,
    }
)


@dataclass(slots=True)
class Router:
    """Parts that exist as long as the app, made before the loop runs."""

    config: RouterConfig
    pool: WorkerPool
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: RouterMetrics
    llm: AsyncLLM
    templates: IsolatedTemplates
    live: LiveFleet
    turns: Turns

    @classmethod
    def of(cls, config: RouterConfig) -> Router:
        """Compose the router. Raises UnusableFolder if the model folder has no tokenizer."""
        if not config.model:
            raise InvalidParameter("model", config.model, "a prepared model folder")
        metrics = RouterMetrics(next(iter(config.served_model_name), ""))
        times = LinkTimes(config.beat_interval, config.beat_timeout, config.stall_timeout)
        curve = KeyRing.load(config.curve_keys, config.curve_peers)
        pool = WorkerPool(new_incarnation(), times=times, counter=metrics, curve=curve)
        fleet = Fleet(pool, PrefixIndex(config.prefix_index_mib << 20))
        admission = AdmissionQueue(
            AdmissionLimits(
                max_inflight_requests=config.max_inflight_requests,
                max_inflight_tokens=config.max_inflight_tokens,
                max_queued_requests=config.max_queued_requests,
                max_queued_tokens=config.max_queued_tokens,
                max_queue_age=config.max_queue_age,
            ),
            metrics,
        )
        limits = DispatchLimits(
            request_timeout=config.request_timeout,
            max_attempts=config.max_attempts,
            worker_wait=config.worker_wait,
            resume_wait=config.resume_wait,
            accept_timeout=config.accept_timeout,
            progress_timeout=config.progress_timeout,
            stream_backlog=config.max_stream_backlog_bytes,
            total_backlog=config.max_backlog_bytes,
        )
        policy = config.placement_policy()
        turns, cpu_pool = Turns(tenant=tenant_id), CpuPool(tenant=tenant_id)
        cpu_pool.on_refused = metrics.too_large_now
        dispatcher = Dispatcher(
            pool, fleet, policy, admission, metrics, limits, turns=turns, cpu_pool=cpu_pool
        )
        tokenizer = Tokenizer.load(config.model)
        tokenizer.max_text_chars = config.max_text_chars
        templates = IsolatedTemplates(max_chars=config.max_text_chars)
        tokenizer.chat_templates.isolated = templates
        tokenizer.chat_templates.learn()
        llm = AsyncLLM(
            dispatcher,
            tokenizer,
            incarnation=pool.me,
            cpu_pool=cpu_pool,
            draw_seed=None,  # the dispatcher draws it
            salt=None if config.share_prefix_cache else salted,
        )
        ceiling = dispatcher.hit_ceiling
        register_gauges(metrics, fleet, admission, ceiling, ready_decode=config.ready_decode)
        live = LiveFleet(fleet, dispatcher, admission, metrics, RouterRates(metrics))
        register_link_series(metrics, live)
        return cls(config, pool, fleet, dispatcher, metrics, llm, templates, live, turns)

    def names(self) -> tuple[str, ...]:
        """Return the names of the model, as configured or reported by workers."""
        if self.config.served_model_name:
            return self.config.served_model_name
        cards = [worker.card.model for worker in self.pool.workers.values()]
        if cards:
            self.metrics.serve(cards[0])
        return tuple(dict.fromkeys(cards))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run links to workers, dispatcher, discovery and rates while the context is open."""
        self.pool.start(self.fleet)
        self.dispatcher.start()
        finding = asyncio.create_task(self._find(), name="discovery")
        rating = asyncio.create_task(self.live.rates.run(), name="rates")
        try:
            yield
        finally:
            finding.cancel()
            rating.cancel()
            await asyncio.gather(finding, rating, return_exceptions=True)
            self.llm.cpu_pool.close()
            self.templates.close()
            await self.dispatcher.close()
            await self.pool.close()

    def takes_embeds(self) -> bool:
        """Return whether a worker accepts prompts of embeddings, or no worker is known yet."""
        workers = self.pool.workers.values()
        return not workers or any(each.card.prompt_embeds is not None for each in workers)

    async def _find(self) -> None:
        """Run discovery, and restart it after a failure."""
        while True:
            try:
                await self._discovery().run()
            except Exception:
                logger.exception("discovery failed, again in %.0f s", FIND_AGAIN)
                self.metrics.discovery_failed()
            await asyncio.sleep(FIND_AGAIN)

    def _discovery(self) -> StaticDiscovery | KubernetesDiscovery:
        config = self.config
        if not config.discovery_selector:
            return StaticDiscovery(self.pool, config.workers)
        return KubernetesDiscovery(
            self.pool,
            namespace=own_namespace(config.discovery_selector),
            selector=config.discovery_selector,
            counter=self.metrics,
        )


def create_app(config: RouterConfig) -> Starlette:
    """Return the ASGI application.

    Raises InvalidParameter for gRPC if its packages are not installed, and for a selector outside
    a pod.
    """
    if config.discovery_selector:
        own_namespace(config.discovery_selector)
    if config.grpc_port and find_spec("grpc_reflection") is None:
        allowed = "0, unless tandem-serving[grpc] is installed"
        raise InvalidParameter("grpc_port", config.grpc_port, allowed)
    router = Router.of(config)
    readiness = ops.Readiness(
        router.fleet,
        prefill=config.ready_prefill,
        decode=config.ready_decode,
        health_waits=config.health_waits,
    )

    authorizer, answers = Authorizer(config), SharedAnswers()
    turns = router.turns

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        rpc = _rpc(app.state.service, config, authorizer, turns)
        quiet = paced(lambda: not router.dispatcher.jobs)
        try:
            async with router.running(), quiet, rpc as app.state.rpc:
                yield
        finally:  # the garbage collector may keep it waiting
            answers.close()
            await asyncio.to_thread(app.state.recorder.end)

    registered = _registered(config)
    app = Starlette(routes=[route for route, _ in registered], lifespan=lifespan)
    table = RouteTable(registered)
    app.router.middleware_stack = Dispatch(app.router.app)
    app.state.document = cache(
        lambda: msgspec.json.encode(document(authorizer, registered, root_path=config.root_path))
    )
    router.metrics.begin_answers(paths_of_workers())
    app.state.router = router
    app.state.fleet = router.fleet
    app.state.live = router.live
    app.state.explanations = router.dispatcher.explanations
    app.state.readiness = readiness
    app.state.answers = answers
    app.state.responses = ResponseStore(
        most=config.max_stored_responses,
        most_bytes=config.max_stored_response_bytes,
        seconds=config.stored_response_ttl,
    )
    app.state.service = Service(
        llm=router.llm,
        metrics=router.metrics,
        canary_metrics=router.dispatcher.canary_metrics,
        names=router.names,
        body_seconds=config.body_timeout,
        stream_seconds=config.request_timeout + SLOW_READER,
        bounds=RequestBounds.of(config),
        parsers=ModelParsers.of(
            router.llm.tokenizer, tools=config.tool_call_parser, reasoning=config.reasoning_parser
        ),
        max_parallel_prompts=config.max_parallel_prompts,
        is_served=lambda: bool(router.pool.serving(WorkerRole.DECODE)),
        trust_request_chat_template=config.trust_request_chat_template,
        allow_request_priority=config.allow_request_priority,
        embeds=EmbedsIntake.of(config, router.takes_embeds),
        unknown_fields=UnknownFields(ignored=config.ignore_unknown_fields),
        keep_alives=KeepAlives(config.sse_keep_alive),
    )
    _handle_errors(app, table, router.metrics.request_cancelled)
    app.add_middleware(InTurn, turns=turns)
    app.add_middleware(Unexpected)
    app.add_middleware(
        BodyLimit,
        max_body_bytes=config.max_body_bytes,
        max_bodies_bytes=config.max_bodies_bytes,
        turns=turns,
    )
    origins, canary = Origins(config), Canary(config.canary_token_file)
    app.add_middleware(
        Authorization, routes=table, authorizer=authorizer, canary=canary, origins=origins
    )
    if config.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_options(config))
    if origins.is_loopback:
        app.add_middleware(OwnPagesOnly, origins=origins)
    app.state.ending = Ending()
    app.add_middleware(Stopping, ending=app.state.ending)
    app.state.recorder = recorder = _recorder(config, router)
    app.add_middleware(Trace, metrics=router.metrics, log=config.access_log, recorder=recorder)
    if config.root_path:
        app.add_middleware(RootPath, prefix=config.root_path)
    return app


def _recorder(config: RouterConfig, router: Router) -> Recorder:
    spans = None
    if config.otlp_traces_endpoint is not None:
        me = router.pool.me.hex()[:8]
        spans = Spans(config, "tandem-router", me, begins_traces=True)
    return Recorder(
        config.timeline_requests,
        config.timeline_mib << 20,
        spans=spans,
        model=lambda: next(iter(router.names()), ""),
    )


def _registered(config: RouterConfig) -> list[tuple[Endpoint, Access]]:
    parts = (
        (Access.CLIENT, (chat, completions, responses, stored_responses, messages, pooled)),
        (Access.CLIENT, (pooled, models, tokenize, debugging, documentation)),
        (Access.OPEN, (ops, page) if config.ui else (ops,)),
        (Access.ADMIN, (administration, sleeping)),
    )
    return [
        (route, Access.CANARY if route.endpoint in _CALLED_BY_CANARY else access)
        for access, modules in parts
        for module in modules
        for route in module.routes
    ]


@asynccontextmanager
async def _rpc(
    service: Service, config: RouterConfig, authorizer: Authorizer, turns: Turns
) -> AsyncIterator[RpcServer | None]:
    if not config.grpc_port:
        yield None
        return
    from tandem.router.api.grpc.server import Server

    server = Server(service, config, authorizer, turns)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(config.drain_timeout)


def _handle_errors(app: Starlette, table: RouteTable, client_gone: Callable[[], None]) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            client_gone()
            return Response(status_code=499)  # the client has left
        return _response(request, answer_of(error))

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        message = f"{error.detail}: {request.method} {request.url.path}"
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(table.methods(request.scope))
        answer = ErrorAnswer(status=error.status_code, message=message, type=kind, headers=headers)
        return _response(request, answer)

    app.add_exception_handler(TandemError, ours)
    app.add_exception_handler(HTTPException, starlettes)


def _response(request: Request, answer: ErrorAnswer) -> Response:
    return Response(
        error_body(request.scope, answer),
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


def serve(config: RouterConfig, *, log_level: str = "info") -> None:
    """Run under uvicorn until SIGINT or SIGTERM. Raises TandemError.

    Running requests get ``drain_timeout``.
    """
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with suppress(KeyboardInterrupt):  # uvicorn raises SIGINT again at the end
        make_server(create_app(config), config, log_level=log_level).run()
