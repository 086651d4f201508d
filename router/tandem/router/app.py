"""The router, composed: links, dispatch, text and HTTP in one process and one event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from tandem.llm.async_llm import AsyncLLM
from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import InvalidParameter, TandemError
from tandem.protocol.ids import new_incarnation
from tandem.protocol.keys import KeyRing
from tandem.router import ops
from tandem.router.admission.queue import AdmissionLimits, AdmissionQueue
from tandem.router.config import RouterConfig
from tandem.router.discovery.kubernetes import KubernetesDiscovery
from tandem.router.discovery.static import StaticDiscovery
from tandem.router.dispatch.dispatcher import Dispatcher, DispatchLimits
from tandem.router.dispatch.fleet import Fleet
from tandem.router.gauges import register_gauges
from tandem.router.http_protocol import JoinedProtocol
from tandem.router.metrics import RouterMetrics
from tandem.router.middleware.auth import ApiKeys
from tandem.router.middleware.canary import Canary
from tandem.router.middleware.limits import BodyLimit
from tandem.router.middleware.trace import Trace
from tandem.router.openai import chat, completions, models, tokenize
from tandem.router.openai.errors import ErrorAnswer, answer_of
from tandem.router.openai.service import Service
from tandem.router.openai.sse import ClientGone
from tandem.router.placement.prefix_index import PrefixIndex
from tandem.router.placement.prefix_load import PrefixLoadPolicy
from tandem.router.workers.liveness import LinkTimes
from tandem.router.workers.pool import WorkerPool
from tandem.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

FIND_AGAIN = 5.0
"""Seconds until a discovery that failed begins anew."""
SLOW_READER = 60.0
"""Seconds beyond a request's deadline that its client may take to read the rest."""
KEEP_ALIVE = 75
"""Seconds; longer than clients keep idle connections, so that none is closed under a request."""


@dataclass(slots=True)
class Router:
    """The parts that live as long as the app, sockets aside: made before the loop runs."""

    config: RouterConfig
    pool: WorkerPool
    fleet: Fleet
    dispatcher: Dispatcher
    metrics: RouterMetrics
    llm: AsyncLLM

    @classmethod
    def of(cls, config: RouterConfig) -> Router:
        """Compose. Raises UnusableFolder when the model folder has no tokenizer."""
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
            accept_timeout=config.accept_timeout,
            progress_timeout=config.progress_timeout,
        )
        policy = PrefixLoadPolicy(config.min_handoff_tokens)
        dispatcher = Dispatcher(pool, fleet, policy, admission, metrics, limits)
        tokenizer = Tokenizer.load(config.model)
        llm = AsyncLLM(dispatcher, tokenizer, incarnation=pool.me)
        register_gauges(metrics, fleet, admission)
        return cls(config, pool, fleet, dispatcher, metrics, llm)

    def names(self) -> tuple[str, ...]:
        """Names of the model: as configured, or as the workers say."""
        if self.config.served_model_name:
            return self.config.served_model_name
        cards = [worker.card.model for worker in self.pool.workers.values()]
        if cards:
            self.metrics.serve(cards[0])
        return tuple(dict.fromkeys(cards))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Links up, deadlines watched; all let go of at the end."""
        self.pool.start(self.fleet)
        self.dispatcher.start()
        finding = asyncio.create_task(self._find(), name="discovery")
        try:
            yield
        finally:
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)
            await self.dispatcher.close()
            await self.pool.close()

    async def _find(self) -> None:
        """Discovery, begun again whenever it fails: without it no worker would ever be found."""
        while True:
            try:
                await self._discovery().run()
            except Exception:
                logger.exception("discovery failed, again in %.0f s", FIND_AGAIN)
                self.metrics.discovery_failed()
            await asyncio.sleep(FIND_AGAIN)

    def _discovery(self) -> StaticDiscovery | KubernetesDiscovery:
        config = self.config
        if config.discovery == "static":
            return StaticDiscovery(self.pool, config.workers)
        return KubernetesDiscovery(
            self.pool,
            namespace=config.discovery_namespace,
            selector=config.discovery_selector,
            counter=self.metrics,
        )


def create_app(config: RouterConfig) -> FastAPI:
    """The ASGI application. Its lifespan holds the links to the workers."""
    router = Router.of(config)
    readiness = ops.Readiness(
        router.fleet, prefill=config.ready_prefill, decode=config.ready_decode
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with router.running():
            gc.freeze()  # what is loaded by now stays; do not look at it again
            yield

    parts = (chat, completions, models, tokenize, ops)
    app = FastAPI(
        title="Tandem",
        version=version("tandem"),
        lifespan=lifespan,
        # Not included as routers: FastAPI would look each request up twice.
        routes=[route for part in parts for route in part.routes.routes],
    )
    app.state.router = router
    app.state.fleet = router.fleet
    app.state.readiness = readiness
    app.state.service = Service(
        llm=router.llm,
        metrics=router.metrics,
        canary_metrics=RouterMetrics(),
        names=router.names,
        body_seconds=config.body_timeout,
        stream_seconds=config.request_timeout + SLOW_READER,
        is_served=lambda: bool(router.pool.serving(WorkerRole.DECODE)),
        trust_request_chat_template=config.trust_request_chat_template,
    )
    _handle_errors(app, router.metrics.request_cancelled)
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes)
    if config.api_key or config.api_keys_dir:
        app.add_middleware(ApiKeys, keys=config.api_key, keys_dir=config.api_keys_dir)
    app.add_middleware(Canary, token_file=config.canary_token_file)
    app.add_middleware(Trace, metrics=router.metrics, log=config.access_log)
    return app


def _handle_errors(app: FastAPI, client_gone: Callable[[], None]) -> None:
    async def ours(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientGone):
            client_gone()
            return Response(status_code=499)  # nobody reads it
        return _response(answer_of(error))

    async def starlettes(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        message = f"{error.detail}: {request.method} {request.url.path}"
        headers = dict(error.headers or {})
        return _response(
            ErrorAnswer(status=error.status_code, message=message, type=kind, headers=headers)
        )

    async def unexpected(request: Request, error: Exception) -> Response:
        return _response(answer_of(error))

    app.add_exception_handler(TandemError, ours)
    app.add_exception_handler(HTTPException, starlettes)
    app.add_exception_handler(Exception, unexpected)


def _response(answer: ErrorAnswer) -> Response:
    return Response(
        answer.body,
        status_code=answer.status,
        headers=answer.headers,
        media_type="application/json",
    )


def serve(config: RouterConfig, *, log_level: str = "info") -> None:
    """Run under uvicorn until SIGINT or SIGTERM; requests under way get ``drain_timeout``."""
    uvicorn.run(
        create_app(config),
        host=config.host,
        port=config.port,
        loop="uvloop",
        http=JoinedProtocol,
        ws="none",
        log_config=None,
        log_level=log_level,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(config.drain_timeout),
    )
