"""What probes and scrapers ask, without a key: alive, ready, which version, what was counted."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from tandem.protocol.child import child_headers
from tandem.protocol.version import tandem_version
from tandem.router.dispatch.fleet import Fleet
from tandem.router.openai.service import service_of

routes = APIRouter(tags=["operation"])


class Readiness:
    """Waits for the whole configured fleet once; from then on for what can serve at all."""

    def __init__(self, fleet: Fleet, *, prefill: int, decode: int) -> None:
        self._fleet = fleet
        self._prefill = prefill
        self._decode = decode

    def problem(self) -> str | None:
        """Why no request should be sent here, or None."""
        problem = self._fleet.servable(prefill=self._prefill, decode=self._decode)
        if problem is None:
            self._prefill, self._decode = 0, min(self._decode, 1)
        return problem


@routes.get("/")
async def show_root() -> Response:
    """What this server is, and where to go on."""
    return _json(
        {
            "name": "tandem",
            "version": tandem_version(),
            "description": "OpenAI's HTTP over prefill and decode workers",
            "models": "/v1/models",
            "docs": "/docs",
            "openapi": "/openapi.json",
        }
    )


@routes.get("/health")
async def health() -> Response:
    """200 while the process answers."""
    return _json({"status": "ok"})


@routes.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request could be served now, else 503 with the reason."""
    problem = request.app.state.readiness.problem()
    if problem is None:
        answer = _json({"status": "ready"})
    else:
        answer = _json({"status": "not ready", "reason": problem}, status=503)
    answer.headers.update(child_headers())
    return answer


@routes.get("/version")
async def show_version() -> Response:
    """Version of Tandem."""
    return _json({"version": tandem_version()})


@routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    text = service_of(request).metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
