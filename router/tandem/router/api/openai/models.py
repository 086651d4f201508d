"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import RequestFailed
from tandem.router.api.openai.service import Service, service_of
from tandem.router.endpoints import Routes
from tandem.router.http.errors import unknown_model

routes = Routes("OpenAI")

_started = int(time.time())


@routes.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Return every name of the model."""
    service = service_of(request)
    names = service.names()
    length = await _max_model_len(service)
    data = [_model(name, names[0], length) for name in names]
    return _json({"object": "list", "data": data})


@routes.get("/v1/models/{model_id:path}")
async def retrieve_model(request: Request) -> Response:
    """Return one model."""
    service, model_id = service_of(request), request.path_params["model_id"]
    if model_id not in service.names():
        raise unknown_model(model_id)
    return _json(_model(model_id, service.names()[0], await _max_model_len(service)))


async def _max_model_len(service: Service) -> int | None:
    if not service.is_served():
        return None
    try:
        return (await service.llm.card()).max_model_len
    except RequestFailed:
        return None


def _model(name: str, root: str, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": _started,
        "owned_by": "tandem",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
    }


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")
