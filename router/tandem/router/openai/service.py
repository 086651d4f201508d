"""What the endpoints stand on, and the few steps that each of them begins with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.routing import request_response

from tandem.llm.async_llm import AsyncLLM
from tandem.protocol.errors import InvalidParameter
from tandem.router.dispatch import routing
from tandem.router.metrics import RouterMetrics
from tandem.router.openai.errors import HttpProblem, body_too_slow, unknown_model
from tandem.router.openai.schemas import Body, GenerationBody
from tandem.router.openai.sse import ClientGone
from tandem.text.input_processor import InputOptions, TruncationSide

MAX_REQUEST_ID = 256


class PlainRoute(APIRoute):
    """A route whose endpoint takes the request and gives a response as they are: FastAPI documents
    it, and spends no time on parameters, dependencies and serializing. For ``FastAPI(routes=...)``:
    a router that is included makes its routes anew."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = request_response(self.endpoint)


@dataclass(slots=True)
class Service:
    """One per app, at ``app.state.service``."""

    llm: AsyncLLM
    metrics: RouterMetrics
    canary_metrics: RouterMetrics
    """Counted and never shown."""
    names: Callable[[], tuple[str, ...]]
    """Names under which the model may be asked for; empty while none is known."""
    body_seconds: float
    """Longest that a body may take to come."""
    stream_seconds: float
    """Longest that a stream may take to be written, its client's slowness included."""
    is_served: Callable[[], bool]
    """Whether a decode worker is up: then its card is known without waiting."""
    trust_request_chat_template: bool = False

    @property
    def counters(self) -> RouterMetrics:
        """Where the request that this task answers is counted."""
        return self.metrics if routing.current.get() is None else self.canary_metrics

    def model_name(self, asked: str | None) -> str:
        """The name to answer with, or HttpProblem 404."""
        names = self.names()
        if asked is None:
            return names[0] if names else ""
        if names and asked not in names:
            raise unknown_model(asked)
        return asked


async def read_body(request: Request) -> bytes:
    """The whole body. Raises HttpProblem (408) when it comes too slowly, ClientGone."""
    seconds = service_of(request).body_seconds
    try:
        async with asyncio.timeout(seconds):
            return await request.body()
    except TimeoutError as error:
        raise HttpProblem(body_too_slow(seconds)) from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while it was sending") from error


def service_of(request: Request) -> Service:
    """The app's service."""
    service: Service = request.app.state.service
    return service


def request_id_of(request: Request, body: GenerationBody) -> str:
    """The client's id (header first, then body), or one of our own; echoed in the answer."""
    state: dict[str, Any] = request.scope["state"]
    given = request.headers.get("x-request-id")
    param, value = ("X-Request-Id", given) if given else ("request_id", body.request_id)
    if value is not None:
        if not (0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable()):
            raise InvalidParameter(
                param, value, f"1 to {MAX_REQUEST_ID} printable ASCII characters"
            )
        state["request_id"] = value
    request_id: str = state["request_id"]
    return request_id


def input_options(body: GenerationBody, request: Request) -> InputOptions:
    """What a body says beside prompt and sampling parameters."""
    side = TruncationSide(body.truncation_side) if body.truncation_side else TruncationSide.LEFT
    return InputOptions(
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=side,
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        trace=request.headers.get("traceparent"),
    )


def documented(model: type[Body]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that reads its body by itself."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
