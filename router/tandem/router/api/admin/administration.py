"""Routes of administrators: settings, the log level, running requests."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.card import ModelCard
from tandem.protocol.commands import CommandName, Reply
from tandem.protocol.link import tandem_version
from tandem.router.api.openai.bodies.schemas import AbortBody, LogLevelBody
from tandem.router.api.openai.service import read, service_of
from tandem.router.api.stopping import Ending
from tandem.router.config import RouterConfig
from tandem.router.endpoints import Routes

routes = Routes("administration")

SECRET = frozenset({"api_key", "admin_api_key"})
"""Settings whose values are hidden."""
ADDRESSES = frozenset({"control"})
LOGGERS = ("tandem", "uvicorn")
"""Loggers whose level is set."""


@routes.get("/server_info")
async def server_info(request: Request) -> Response:
    """Return the settings of this router, and the cards of its workers."""
    config: RouterConfig = request.app.state.router.config
    workers = request.app.state.fleet.pool.workers.values()
    return _json(
        {
            "version": tandem_version(),
            "router": _settings(config),
            "workers": {each.name: _fields_of(each.card) for each in workers},
        }
    )


@routes.get("/log_level")
async def show_log_level(_: Request) -> Response:
    """Return the lowest level that this router logs."""
    return _json({"log_level": _level()})


@routes.post("/log_level")
async def set_log_level(request: Request) -> Response:
    """Set the log level until the process ends."""
    body = await read(LogLevelBody, request)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(body.log_level.upper())
    return _json({"log_level": _level()})


@routes.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """End calls by their ids."""
    body = await read(AbortBody, request)
    ending: Ending = request.app.state.ending
    return _json({"aborted": ending.abort(frozenset(body.request_ids))})


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Drop cached blocks on every worker; 503 if one refuses."""
    return _answer_of(await service_of(request).llm.call(CommandName.RESET_PREFIX_CACHE))


@routes.post("/flush_cache")
async def flush_cache(request: Request) -> Response:
    """Same as /reset_prefix_cache, by SGLang's name."""
    return await reset_prefix_cache(request)


@routes.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start a profile on every worker, for 20 s at most; 503 if one fails."""
    return _answer_of(await service_of(request).llm.call(CommandName.START_PROFILE))


@routes.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """Write the profile of every worker to a folder of its machine; 503 if one fails."""
    return _answer_of(await service_of(request).llm.call(CommandName.STOP_PROFILE))


def _level() -> str:
    return logging.getLevelName(logging.getLogger(LOGGERS[0]).getEffectiveLevel()).lower()


def _settings(config: RouterConfig) -> dict[str, Any]:
    found = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    return {
        name: f"{len(value)} given" if name in SECRET else value for name, value in found.items()
    }


def _fields_of(card: ModelCard) -> dict[str, Any]:
    fields = {name: getattr(card, name) for name in card.__struct_fields__ if name not in ADDRESSES}
    return {**fields, "incarnation": card.incarnation and card.incarnation.hex()}


def _answer_of(reply: Reply) -> Response:
    answer = _json({"ok": reply.ok, "message": reply.message})
    answer.status_code = 200 if reply.ok else 503
    return answer


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content, enc_hook=str), media_type="application/json")
