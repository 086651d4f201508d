"""Routes that show the state of a router: workers, links, the last calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.service import service_of
from tandem.router.config import RouterConfig
from tandem.router.endpoints import Routes
from tandem.router.http.shared_answers import SharedAnswers
from tandem.router.observe.fleet_view import LiveFleet
from tandem.router.observe.timeline.recorder import Recorder
from tandem.router.observe.timeline.view import full, listed
from tandem.router.tenant import current_tenant

routes = Routes("operation")

USUAL_CALLS = 20
MOST_CALLS = 100


@routes.get("/debug/canary")
async def debug_canary(request: Request) -> Response:
    """Return the counts of canaries as a Prometheus exposition."""
    answers: SharedAnswers = request.app.state.answers
    text = await answers.get("canary", service_of(request).canary_metrics.reading, owner="canary")
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@routes.get("/debug/fleet")
async def debug_fleet(request: Request) -> Response:
    """Return workers, the links between them, queues and rates."""
    live: LiveFleet = request.app.state.live
    return await _shared(request, "fleet", live.to_json)


@routes.get("/debug/fabric")
async def debug_fabric(request: Request) -> Response:
    """Return the links that move KV: transport, GB/s, state and its reason."""
    live: LiveFleet = request.app.state.live
    return await _shared(request, "fabric", live.fabric)


@routes.get("/debug/requests")
async def debug_requests(request: Request) -> Response:
    """Return the last calls (1 to 100), the latest first, with a summary of their times."""
    for name, value in request.query_params.items():
        if name != "limit":
            raise InvalidParameter(name[:80], value, "only limit")
    most = _limit(request.query_params.get("limit"))
    recorder: Recorder = request.app.state.recorder
    reader = current_tenant.get()

    def read() -> object:
        now, kept = time.monotonic(), recorder.ring.num_kept(reader)
        latest = recorder.ring.latest(most, reader)
        return {"kept": kept, "requests": [listed(each, now) for each in latest]}

    return await _shared(request, f"requests {most}", read)


@routes.get("/debug/requests/{request_id:path}")
async def debug_request(request: Request) -> Response:
    """Return the timeline of one of the last calls; 404 if it is not kept."""
    request_id = request.path_params["request_id"]
    recorder: Recorder = request.app.state.recorder
    reader = current_tenant.get()
    recording = recorder.ring.find(request_id, reader)
    if recording is None:
        message = f"no call {request_id[:80]!r} is kept; {recorder.ring.num_kept(reader)} are"
        raise HTTPException(404, message)
    return await _shared(
        request, f"request {request_id}", lambda: full(recording, time.monotonic())
    )


@routes.get("/debug/placements")
async def debug_placements(request: Request) -> Response:
    """Return the latest placements: the predicted cost of each choice, and the outcome."""
    reader = current_tenant.get()
    explanations = request.app.state.explanations
    return await _shared(
        request, "placements", lambda: {"placements": explanations.to_json(reader)}
    )


@routes.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return tokenizer_config.json with the chat template; 404 unless that is allowed."""
    config: RouterConfig = request.app.state.router.config
    if not config.enable_tokenizer_info_endpoint:
        raise HTTPException(404, "requires --enable-tokenizer-info-endpoint")
    tokenizer = service_of(request).llm.tokenizer
    # The template is part of the settings even if it has its own file.
    return await _shared(
        request,
        "tokenizer",
        lambda: {"chat_template": tokenizer.chat_templates.text or None, **tokenizer.config},
    )


@routes.get("/get_model_info")
async def get_model_info(request: Request) -> Response:
    """Return SGLang's facts about a model, as far as they are known."""
    service = service_of(request)
    card = await service.llm.card()
    name = service.model_name(None)
    content = {
        "model_path": name,
        "tokenizer_path": name,
        "is_generation": card.pooling is None or card.pooling.generates,
        "preferred_sampling_params": None,
        "max_model_len": card.max_model_len,
        "vocab_size": card.vocab_size,
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


def _limit(asked: str | None) -> int:
    if asked is None:
        return USUAL_CALLS
    if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:9]) <= MOST_CALLS):
        raise InvalidParameter("limit", asked, f"an integer from 1 to {MOST_CALLS}")
    return int(asked)


async def _shared(request: Request, name: str, read: Callable[[], object]) -> Response:
    answers: SharedAnswers = request.app.state.answers
    tenant = current_tenant.get()
    owner = f"{tenant.id} {tenant.is_admin}"
    content = await answers.get(name, lambda: partial(msgspec.json.encode, read()), owner=owner)
    return Response(content, media_type="application/json")
