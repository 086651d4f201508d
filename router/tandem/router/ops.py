"""What operators ask: alive, ready, which version, what was counted, who is up."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from tandem.protocol.child import child_headers
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.version import tandem_version
from tandem.router.dispatch.fleet import Fleet
from tandem.router.live.fleet_view import LiveFleet
from tandem.router.openai.service import service_of
from tandem.router.timeline.recorder import Recorder
from tandem.router.timeline.view import full, listed

routes = APIRouter(tags=["operation"])

USUAL_CALLS = 20
MOST_CALLS = 100
"""Calls that one answer lists."""


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


@routes.get("/debug/canary")
async def debug_canary(request: Request) -> Response:
    """What the operator's canaries counted, as a Prometheus exposition: not scraped with users'."""
    text = service_of(request).canary_metrics.text()
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@routes.get("/debug/fleet")
async def debug_fleet(request: Request) -> Response:
    """Workers, links between them, what waits for what, and how fast it goes."""
    live: LiveFleet = request.app.state.live
    return _json(live.to_json())


@routes.get("/debug/fabric")
async def debug_fabric(request: Request) -> Response:
    """The links by which KV goes: each one's transport, GB/s, state and why."""
    live: LiveFleet = request.app.state.live
    return _json(live.fabric())


@routes.get("/debug/requests")
async def debug_requests(request: Request, limit: str | None = None) -> Response:
    """The last calls, the latest first, each with where its time went in short; 1 to 100."""
    for name, value in request.query_params.items():
        if name != "limit":
            raise InvalidParameter(name[:80], value, "only limit may be asked")
    recorder: Recorder = request.app.state.recorder
    now = time.monotonic()
    latest = recorder.ring.latest(_limit(limit))
    return _json({"kept": len(recorder.ring), "requests": [listed(each, now) for each in latest]})


@routes.get("/debug/requests/{request_id:path}")
async def debug_request(request: Request, request_id: str) -> Response:
    """Where the time of one of the last calls went, in full; 404 for one that is not kept."""
    recorder: Recorder = request.app.state.recorder
    recording = recorder.ring.find(request_id)
    if recording is None:
        message = f"no call {request_id[:80]!r} is kept; {len(recorder.ring)} are"
        raise HTTPException(404, message)
    return _json(full(recording, time.monotonic()))


@routes.get("/debug/placements")
async def debug_placements(request: Request) -> Response:
    """Where the latest attempts went, what each way was to come to, and what came of it."""
    return _json({"placements": request.app.state.explanations.to_json()})


def _limit(asked: str | None) -> int:
    if asked is None:
        return USUAL_CALLS
    if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:9]) <= MOST_CALLS):
        raise InvalidParameter("limit", asked, f"an integer from 1 to {MOST_CALLS}")
    return int(asked)


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
