"""What operators ask: alive, ready, which version, what was counted, who is up."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from tandem.protocol.child import child_headers
from tandem.protocol.commands import CommandName
from tandem.protocol.messages import LoadReport
from tandem.router.dispatch.fleet import Fleet
from tandem.router.openai.service import service_of
from tandem.router.timeline.recorder import Recorder
from tandem.router.timeline.view import full
from tandem.router.workers.pool import Worker

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
            self._prefill, self._decode = 0, 1
        return problem


@routes.get("/")
async def show_root() -> Response:
    """What this server is, and where to go on."""
    return _json(
        {
            "name": "tandem",
            "version": version("tandem"),
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
    return _json({"version": version("tandem")})


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
    """Links, workers, their load and what is known of their caches."""
    fleet: Fleet = request.app.state.fleet
    return _json(
        {
            "router": fleet.pool.me.hex(),
            "links": dict(fleet.pool.links().items()),
            "workers": [_worker(worker) for worker in fleet.pool.workers.values()],
            "transport": _transport(fleet),
            "keys": [] if fleet.pool.curve is None else fleet.pool.curve.names(),
            "refused": fleet.pool.refused(),
            "quarantined": [
                {"prefill": p.hex(), "decode": d.hex(), "cause": cause}
                for (p, d), cause in fleet.links.quarantined().items()
            ],
            "indexed_blocks": len(fleet.index),
        }
    )


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


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Drop cached blocks on every worker; 503 when one refuses."""
    reply = await service_of(request).llm.call(CommandName.RESET_PREFIX_CACHE)
    content = {"ok": reply.ok, "message": reply.message}
    return _json(content, status=200 if reply.ok else 503)


def _transport(fleet: Fleet) -> str | None:
    """What moves KV over the links that are up; more than one where ends differ."""
    links = (state for worker in fleet.pool.workers.values() for state in worker.peers.values())
    return ", ".join(sorted({each.transport for each in links if each.up} - {""})) or None


def _worker(worker: Worker) -> dict[str, Any]:
    load: LoadReport | None = worker.load
    return {
        "name": worker.name,
        "incarnation": worker.incarnation.hex(),
        "model": worker.card.model,
        "fingerprint": worker.fingerprint,
        "pod": worker.note.pod,
        "revision": worker.note.revision,
        "draining": not worker.takes_new,
        "legs": worker.num_legs,
        "load": None if load is None else msgspec.to_builtins(load),
        "peers": {peer.hex(): state.up for peer, state in worker.peers.items()},
    }


def _json(content: object, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status_code=status, media_type="application/json")
