"""The OpenAPI document: the input of each path and every status of its answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.commands import SleepMode
from tandem.protocol.link import tandem_version
from tandem.router.api.admin.sleeping import USUAL_LEVEL, USUAL_WAIT_S
from tandem.router.api.anthropic import answers as message_answers
from tandem.router.api.anthropic import body as message_bodies
from tandem.router.api.openai.answers import types
from tandem.router.api.openai.bodies import pooling_schemas, schemas, tools
from tandem.router.api.openai.bodies.bounds import Body
from tandem.router.api.openai.bodies.hints import CONDITIONS, Hint
from tandem.router.api.openai.bodies.parameters import Refused
from tandem.router.api.openai.responses import answers as response_answers
from tandem.router.api.openai.responses import body as response_bodies
from tandem.router.endpoints import Endpoint, Routes
from tandem.router.http.access import Access, Authorizer
from tandem.router.http.shared_answers import SharedAnswers

routes = Routes()

DOCUMENT = "/openapi.json"


@routes.get(DOCUMENT)
async def openapi(request: Request) -> Response:
    """Return the OpenAPI document of this server."""
    answers: SharedAnswers = request.app.state.answers
    content = await answers.get("openapi", lambda: request.app.state.document, owner="openapi")
    return Response(content, media_type="application/json")


ERRORS: Mapping[int, str] = {
    400: "The request is wrong: the error names the field, its value and what is allowed.",
    401: "Missing or wrong API key.",
    403: "Administration is off: the server has neither keys for it nor --enable-admin-api.",
    404: "No such path, no such model, or no such call.",
    408: "The body was sent too slowly.",
    413: "The body is too large.",
    429: "Too many requests wait already.",
    500: "A fault of the server.",
    503: "No worker can serve this now.",
    504: "The request's deadline has passed.",
}
_BEFORE = (
    "OpenAI's HTTP with vLLM's extensions. Before a request has a path it may be answered 400, "
    "403, 408, 431 or 503, in the shape of every error: its head is broken, slow or large, its "
    "Host or Origin is not allowed, or too many connections are open."
)
_HINTS = (
    "Fields without effect are named in the header `x-tandem-ignored` of an answer. With some "
    f"models or values these have none: {', '.join(f'`{name}`' for name in CONDITIONS)}."
)
_RETRIED = (429, 503)
_TAKING = (400, 404, 408, 413, 500)
_GENERATING = (*_TAKING, 429, 503, 504)
_STORED = (400, 404, 500, 503)
_OPTIONAL: Mapping[str, object] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_BODIES: tuple[type[Body], ...] = (
    *(schemas.ChatBody, schemas.CompletionBody, schemas.TokenizeBody, schemas.DetokenizeBody),
    *(schemas.LogLevelBody, schemas.AbortBody),
    *(
        schemas.StreamOptions,
        tools.ResponseFormat,
        tools.StructuredOutputs,
        tools.JsonSchema,
    ),
    *pooling_schemas.bodies(),
    *response_bodies.bodies(),
    *message_bodies.bodies(),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    gives: type[BaseModel] | str
    """Answer of 200: an object, or a media type of text."""
    takes: type[Body] | None = None
    streams: type[BaseModel] | None = None
    """Events instead of the answer, with stream=true."""
    names_events: bool = False
    """Whether an event has its name in addition to its data."""
    errors: tuple[int, ...] = (500, 503)
    other_statuses: tuple[int, ...] = ()
    """Statuses other than 200 with the same object instead of an error."""
    fails: type[BaseModel] = types.ErrorBody
    queries: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/v1/chat/completions"): Operation(
        takes=schemas.ChatBody,
        gives=types.ChatCompletion,
        streams=types.ChatChunk,
        errors=_GENERATING,
    ),
    ("post", "/v1/completions"): Operation(
        takes=schemas.CompletionBody,
        gives=types.Completion,
        streams=types.CompletionChunk,
        errors=_GENERATING,
    ),
    ("post", "/v1/responses"): Operation(
        takes=response_bodies.ResponsesBody,
        gives=response_answers.ResponseObject,
        streams=response_answers.ResponseEvent,
        names_events=True,
        errors=_GENERATING,
    ),
    ("post", "/v1/messages"): Operation(
        takes=message_bodies.MessagesBody,
        gives=message_answers.MessageObject,
        streams=message_answers.MessageEvent,
        names_events=True,
        fails=message_answers.MessageError,
        errors=_GENERATING,
    ),
    ("post", "/v1/messages/count_tokens"): Operation(
        takes=message_bodies.CountBody,
        gives=message_answers.TokenCount,
        fails=message_answers.MessageError,
        errors=(*_TAKING, 503),
    ),
    ("get", "/v1/responses/{response_id}"): Operation(
        gives=response_answers.ResponseObject, errors=_STORED
    ),
    ("delete", "/v1/responses/{response_id}"): Operation(
        gives=response_answers.DeletedResponse, errors=_STORED
    ),
    ("post", "/v1/responses/{response_id}/cancel"): Operation(
        gives=response_answers.ResponseObject, errors=_STORED
    ),
    ("get", "/v1/responses/{response_id}/input_items"): Operation(
        gives=response_answers.InputItems,
        errors=_STORED,
        queries=dict.fromkeys(("after", "limit", "order"), _OPTIONAL),
    ),
    **{
        ("post", path): Operation(takes=takes, gives=gives, errors=_GENERATING)
        for takes, gives, *paths in (
            (pooling_schemas.EmbeddingBody, types.EmbeddingList, "/v1/embeddings"),
            (pooling_schemas.PoolingBody, types.PoolingList, "/pooling"),
            (pooling_schemas.ClassifyBody, types.ClassificationList, "/classify"),
            (pooling_schemas.ScoreBody, types.ScoreList, "/score", "/v1/score"),
            (
                *(pooling_schemas.RerankBody, types.RerankList),
                *("/rerank", "/v1/rerank", "/v2/rerank"),
            ),
        )
        for path in paths
    },
    ("get", "/v1/models"): Operation(gives=types.ModelList),
    ("get", "/v1/models/{model_id}"): Operation(gives=types.Model, errors=(404, 500, 503)),
    ("post", "/tokenize"): Operation(
        takes=schemas.TokenizeBody, gives=types.Tokens, errors=(*_TAKING, 503)
    ),
    ("post", "/detokenize"): Operation(
        takes=schemas.DetokenizeBody, gives=types.Text, errors=(*_TAKING, 503)
    ),
    ("get", "/"): Operation(gives=types.Status),
    ("get", "/health"): Operation(gives=types.Status, other_statuses=(503,)),
    ("get", "/ping"): Operation(gives=types.Status, other_statuses=(503,)),
    ("post", "/ping"): Operation(gives=types.Status, other_statuses=(503,)),
    ("get", "/live"): Operation(gives=types.Status),
    ("get", "/load"): Operation(gives=types.Status),
    ("get", "/get_model_info"): Operation(gives=types.Status),
    ("get", "/ready"): Operation(gives=types.Status, other_statuses=(503,)),
    ("get", "/version"): Operation(gives=types.Status),
    ("get", "/metrics"): Operation(gives="text/plain"),
    ("get", "/debug/canary"): Operation(gives="text/plain"),
    ("get", "/debug/fabric"): Operation(gives=types.Status),
    ("get", "/debug/fleet"): Operation(gives=types.Status),
    ("get", "/debug/placements"): Operation(gives=types.Status),
    ("get", "/debug/requests"): Operation(
        gives=types.Status, errors=(400, 500, 503), queries={"limit": _OPTIONAL}
    ),
    ("get", "/debug/requests/{request_id}"): Operation(gives=types.Status, errors=(404, 500, 503)),
    ("post", "/reset_prefix_cache"): Operation(gives=types.Status, other_statuses=(503,)),
    ("post", "/flush_cache"): Operation(gives=types.Status, other_statuses=(503,)),
    ("post", "/sleep"): Operation(
        gives=types.Status,
        other_statuses=(503,),
        errors=(400, 500),
        queries={
            "level": {"type": "string", "default": USUAL_LEVEL},
            "mode": {"type": "string", "default": SleepMode.ABORT},
            "timeout": {"type": "string", "default": USUAL_WAIT_S},
        },
    ),
    ("post", "/wake_up"): Operation(
        gives=types.Status,
        other_statuses=(503,),
        errors=(400, 500),
        queries={"tags": {"type": "array", "items": {"type": "string"}, "default": []}},
    ),
    ("get", "/is_sleeping"): Operation(gives=types.Status, errors=(400, 500, 503)),
    ("post", "/start_profile"): Operation(gives=types.Status, other_statuses=(503,)),
    ("post", "/stop_profile"): Operation(gives=types.Status, other_statuses=(503,)),
    ("get", "/server_info"): Operation(gives=types.Status),
    ("get", "/log_level"): Operation(gives=types.Status),
    ("post", "/log_level"): Operation(
        takes=schemas.LogLevelBody, gives=types.Status, errors=_TAKING
    ),
    ("post", "/abort_requests"): Operation(
        takes=schemas.AbortBody, gives=types.Status, errors=_TAKING
    ),
    ("get", "/tokenizer_info"): Operation(gives=types.Status, errors=(404, 500, 503)),
}


def paths_of_workers() -> list[str]:
    """Return the paths that workers answer."""
    return [path for (_, path), operation in OPERATIONS.items() if operation.errors is _GENERATING]


def document(
    authorizer: Authorizer,
    registered: Sequence[tuple[Endpoint, Access]],
    *,
    root_path: str = "",
) -> dict[str, Any]:
    """Return the whole document. Raises KeyError for a path without a description."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint, access in registered:
        if endpoint.tag is not None:
            described = _describe(endpoint, authorizer.refusals(access))
            paths.setdefault(endpoint.path_format, {}).update(described)
    content: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "description": f"{_BEFORE}\n\n{_HINTS}",
            "version": tandem_version(),
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if authorizer.has_keys:
        content["components"]["securitySchemes"] = {
            "ApiKey": {"type": "http", "scheme": "bearer"},
            "XApiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return content


def _describe(endpoint: Endpoint, guards: tuple[int, ...]) -> dict[str, Any]:
    """Describe an endpoint. ``guards``: statuses of answers to requests without the right key."""
    (method,) = map(str.lower, endpoint.methods or ())
    operation, name = OPERATIONS[method, endpoint.path_format], endpoint.name
    described: dict[str, Any] = {
        "tags": [endpoint.tag],
        "summary": _title(name),
        "description": inspect.getdoc(endpoint.endpoint),
        "operationId": re.sub(r"\W", "_", f"{name}{endpoint.path_format}") + f"_{method}",
    }
    parameters = [
        *(_parameter("path", each, {"type": "string"}) for each in endpoint.param_convertors),
        *(_parameter("query", each, schema) for each, schema in operation.queries.items()),
    ]
    if parameters:
        described["parameters"] = parameters
    statuses = sorted({*operation.errors, *guards})
    described["responses"] = {
        "200": _answer(operation, "The result."),
        **{str(status): _error(operation, status) for status in statuses},
        **{str(status): _either(operation, status) for status in operation.other_statuses},
    }
    if operation.takes is not None:
        content: dict[str, Any] = {"schema": _ref(operation.takes)}
        if operation.takes.EXAMPLE:
            content["example"] = operation.takes.EXAMPLE
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if 401 in guards:
        described["security"] = [{"ApiKey": []}, {"XApiKey": []}]
    return {method: described}


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _parameter(place: str, name: str, schema: Mapping[str, object]) -> dict[str, Any]:
    return {
        "name": name,
        "in": place,
        "required": place == "path",
        "schema": {**schema, "title": _title(name)},
    }


def _answer(operation: Operation, description: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(operation.gives, str):
        content[operation.gives] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": _ref(operation.gives)}
    if operation.streams is not None:
        content["text/event-stream"] = {"schema": _event(operation.streams, operation.names_events)}
    return {"description": description, "content": content, "headers": _headers("X-Request-Id")}


def _event(model: type[BaseModel], has_name: bool) -> dict[str, Any]:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _ref(model),
        "description": "A JSON object." if has_name else "A JSON object; the last one is [DONE].",
    }
    fields = {"event": {"type": "string"}, "data": data} if has_name else {"data": data}
    return {"type": "object", "properties": fields, "required": [*fields]}


def _error(operation: Operation, status: int) -> dict[str, Any]:
    names = ("X-Request-Id", *(("Retry-After",) if status in _RETRIED else ()))
    content = {"application/json": {"schema": _ref(operation.fails)}}
    return {"description": ERRORS[status], "content": content, "headers": _headers(*names)}


def _either(operation: Operation, status: int) -> dict[str, Any]:
    answer = _answer(operation, ERRORS[status])
    for content in answer["content"].values():
        content["schema"] = {"anyOf": [content["schema"], _ref(operation.fails)]}
    return answer


def _headers(*names: str) -> dict[str, Any]:
    return {name: {"schema": {"type": "string"}} for name in names}


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _schemas() -> dict[str, Any]:
    models: list[type[BaseModel]] = [
        *_BODIES,
        *types.models(),
        *types.pooling_models(),
        *response_answers.models(),
        *message_answers.models(),
    ]
    _, defined = models_json_schema(
        [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
    )
    found: dict[str, Any] = defined["$defs"]
    for body in _BODIES:
        schema = found[body.__name__]
        schema["additionalProperties"] = False
        others: dict[str, Refused | Hint] = {**body.REFUSED, **body.HINTS}
        for name, each in others.items():
            schema["properties"].setdefault(name, each.schema())
    return found
