"""Routes of probes and scrapers, without a key: live, ready, version, metrics."""

from __future__ import annotations

from functools import cache

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from tandem.base.listening import child_headers
from tandem.protocol.link import tandem_version
from tandem.router.api.openai.service import service_of
from tandem.router.dispatch.fleet import Fleet
from tandem.router.endpoints import Routes
from tandem.router.http.shared_answers import SharedAnswers

routes = Routes("operation")


class Readiness:
    """Readiness: first of the configured fleet, later of any workers that can serve."""

    def __init__(self, fleet: Fleet, *, prefill: int, decode: int, health_waits: bool) -> None:
        """``health_waits``: ``/health`` waits for the fleet, too."""
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode
        self._health_waits = health_waits

    def problem(self) -> str | None:
        """Return the reason to send no request here, or None."""
        problem = self._fleet.servable(prefill=self._prefill, decode=self._decode)
        if problem is None:
            self._prefill, self._decode = 0, min(self._decode, 1)
        return problem

    def sickness(self) -> str | None:
        """Return why this server is not healthy, or None. A sleeping fleet is healthy."""
        problem = self.problem() if self._health_waits else None
        return None if self._fleet.sleeps(pooled=self._decode == 0) else problem


@routes.get("/")
async def show_root(_: Request) -> Response:
    """Return the name of this server and its links."""
    return _json(
        {
            "name": "tandem",
            "version": _version(),
            "description": "OpenAI's HTTP over prefill and decode workers",
            "models": "/v1/models",
            "docs": "/docs",
            "openapi": "/openapi.json",
        }
    )


@routes.get("/health")
async def health(request: Request) -> Response:
    """Return 200 after requests could be served, until none can: then 503 with the reason.

    With --discovery-selector: 200.
    """
    return _health(request)


@routes.get("/ping")
async def ping(request: Request) -> Response:
    """Same as /health."""
    return _health(request)


@routes.post("/ping")
async def post_ping(request: Request) -> Response:
    """Same as /health."""
    return _health(request)


@routes.get("/live")
async def live(_: Request) -> Response:
    """Return 200."""
    return _json({"status": "ok"})


@routes.get("/ready")
async def ready(request: Request) -> Response:
    """Return 200 if a request could be served now, else 503 with the reason."""
    answer = _status(request.app.state.readiness.problem(), "ready", "not ready")
    answer.headers.update(child_headers())
    return answer


@routes.get("/load")
async def load(request: Request) -> Response:
    """Return the number of running and waiting requests."""
    admission = request.app.state.router.dispatcher.admission
    return _json({"server_load": admission.num_running + admission.num_waiting})


@routes.get("/version")
async def show_version(_: Request) -> Response:
    """Return the version of Tandem."""
    return _json({"version": _version()})


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the Prometheus exposition."""
    answers: SharedAnswers = request.app.state.answers
    text = await answers.get("metrics", service_of(request).metrics.reading, owner="metrics")
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _health(request: Request) -> Response:
    return _status(request.app.state.readiness.sickness(), "ok", "not healthy")


def _status(problem: str | None, good: str, bad: str) -> Response:
    if problem is None:
        return _json({"status": good})
    return _json({"status": bad, "reason": problem}, status=503)


_version = cache(tandem_version)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
