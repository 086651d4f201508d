"""Stored responses: ``GET`` and ``DELETE /v1/responses/{id}``, their input, and no cancelling."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import InvalidParameter
from tandem.router.endpoints import Routes
from tandem.router.openai.errors import ErrorAnswer, HttpProblem
from tandem.router.openai.responses.store import ResponseStore, Stored, input_items, size_of
from tandem.router.openai.service import service_of
from tandem.router.openai.written import MAX_NAME, shortened
from tandem.router.tenant import current_tenant

routes = Routes("OpenAI")

MOST_ITEMS = 100
"""Most items in one page of input items."""


def store_of(request: Request) -> ResponseStore:
    """Return the app's store."""
    store: ResponseStore = request.app.state.responses
    return store


def not_stored(response_id: str, param: str) -> HttpProblem:
    """Return the answer 404 for a response that is not (or no longer) in this router's memory."""
    name = shortened(response_id, MAX_NAME)
    message = f"{param}: no response `{name}` is stored: this router keeps some in its own memory"
    return HttpProblem(
        ErrorAnswer(
            status=404,
            message=message,
            type="invalid_request_error",
            param=param,
            code="response_not_found",
        )
    )


@routes.get("/v1/responses/{response_id}")
async def retrieve_response(request: Request) -> Response:
    """A response, as it was answered."""
    _check_query(request)
    return Response(_found(request).body, media_type="application/json")


@routes.delete("/v1/responses/{response_id}")
async def delete_response(request: Request) -> Response:
    """Forget a response; what goes on from it stays."""
    _check_query(request)
    response_id = request.path_params["response_id"]
    if not store_of(request).remove(current_tenant.get().id, response_id):
        raise not_stored(response_id, "response_id")
    content = {"id": response_id, "object": "response", "deleted": True}
    return Response(msgspec.json.encode(content), media_type="application/json")


@routes.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request) -> Response:
    """Refused: a response is cancelled by leaving the connection that it comes on."""
    _check_query(request)
    _found(request)
    allowed = "one of a background response, and none are: leave the connection to cancel"
    raise InvalidParameter("response_id", request.path_params["response_id"], allowed)


@routes.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request) -> Response:
    """Return the input items of a response in pages, earlier turns included."""
    _check_query(request, "after", "limit", "order")
    after, limit, order = map(request.query_params.get, ("after", "limit", "order"))
    turn = _found(request).turn
    most = _limit(limit)
    items = await service_of(request).llm.beside.run(size_of(turn), input_items, turn)
    if order not in (None, "asc", "desc"):
        raise InvalidParameter("order", order, '"asc" or "desc"')
    if order != "asc":
        items.reverse()
    start = 0
    if after is not None:
        start = next((at + 1 for at, each in enumerate(items) if each["id"] == after), 0)
        if not start:
            raise InvalidParameter("after", after, "the id of an item of this response")
    page = items[start : start + most]
    content = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + most < len(items),
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


def _limit(asked: str | None) -> int:
    if asked is None:
        return 20
    if not (asked.isascii() and asked.isdecimal() and 1 <= int(asked[:9]) <= MOST_ITEMS):
        raise InvalidParameter("limit", asked, f"an integer from 1 to {MOST_ITEMS}")
    return int(asked)


def _found(request: Request) -> Stored:
    response_id = request.path_params["response_id"]
    found = store_of(request).get(current_tenant.get().id, response_id)
    if found is None:
        raise not_stored(response_id, "response_id")
    return found


def _check_query(request: Request, *known: str) -> None:
    for name, value in request.query_params.items():
        if name not in known:
            allowed = f"only {', '.join(known)} may be asked" if known else "nothing may be asked"
            raise InvalidParameter(shortened(name, MAX_NAME), value, allowed)
