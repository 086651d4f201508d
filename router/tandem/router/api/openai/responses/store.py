"""Stored responses of each tenant, in the memory of this router.

Bounded by number, bytes and age. The tenant with the most loses its least recently used response.
Turns of a conversation share earlier turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.responses.items import Item
from tandem.router.api.openai.service import service_of
from tandem.router.endpoints import Routes
from tandem.router.http.errors import (
    MAX_NAME,
    ErrorAnswer,
    HttpProblem,
    shortened,
)
from tandem.router.tenant import TenantParts, current_tenant

OVERHEAD = 1_024
"""Bytes of a response in addition to its text."""


@dataclass(slots=True)
class Turn:
    """Items of one response and the turn before it."""

    before: Turn | None
    inputs: bytes
    outputs: bytes
    users: int = 0
    """Number of stored responses and later turns that hold it."""

    @property
    def size(self) -> int:
        return len(self.inputs) + len(self.outputs)


def size_of(turn: Turn | None) -> int:
    """Return the bytes of a turn and all before it."""
    total = 0
    while turn is not None:
        total, turn = total + turn.size, turn.before
    return total


@dataclass(frozen=True, slots=True)
class Stored:
    """Response as JSON, and its turn."""

    body: bytes
    turn: Turn
    used: float
    """Time of the last use, in seconds."""


class ResponseStore:
    """Store of a router; not thread-safe."""

    def __init__(
        self,
        *,
        most: int,
        most_bytes: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._stored: dict[str, Stored] = {}
        self._parts: TenantParts[str] = TenantParts()

    @property
    def num_bytes(self) -> int:
        return self._parts.num_bytes

    def __len__(self) -> int:
        return len(self._stored)

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """Return a response and mark it as used; None if this tenant does not have it."""
        self._forget_old()
        if self._parts.owner(response_id) != tenant:
            return None
        found = self._stored[response_id]
        self._stored[response_id] = Stored(found.body, found.turn, self._clock())
        self._parts.use(response_id)
        return found

    def put(self, tenant: str, response_id: str, body: bytes, turn: Turn) -> None:
        """Store a response, and evict older ones for it.

        Larger responses than the bound are not stored. ``turn`` builds on turns of the same tenant.
        """
        self._forget_old()
        if self._most == 0 or len(body) + turn.size + OVERHEAD > self._most_bytes:
            return
        self._stored[response_id] = Stored(body, turn, self._clock())
        self._parts.add(tenant, response_id, len(body) + OVERHEAD)
        self._hold(tenant, turn)
        while len(self._stored) > self._most or self.num_bytes > self._most_bytes:
            self._forget(self._parts.first_to_go(by_bytes=len(self._stored) <= self._most))

    def remove(self, tenant: str, response_id: str) -> bool:
        """Remove a response; return whether it existed."""
        if self._parts.owner(response_id) != tenant:
            return False
        self._forget(response_id)
        return True

    def _forget(self, response_id: str) -> None:
        tenant, found = self._parts.owner(response_id), self._stored.pop(response_id)
        assert tenant is not None, "each response has a tenant"
        self._parts.remove(response_id)
        self._let_go(tenant, found.turn)

    def _hold(self, tenant: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.users += 1
            if turn.users > 1:
                return
            self._parts.grow(tenant, turn.size)
            turn = turn.before

    def _let_go(self, tenant: str, turn: Turn | None) -> None:
        while turn is not None:
            turn.users -= 1
            if turn.users:
                return
            self._parts.grow(tenant, -turn.size)
            turn = turn.before

    def _forget_old(self) -> None:
        oldest = self._clock() - self._seconds
        while old := [each for each in self._parts.oldest() if self._stored[each].used < oldest]:
            for each in old:
                self._forget(each)


def encoded(items: list[Item]) -> bytes:
    """Return items as they are stored."""
    return msgspec.json.encode(items)


def earlier_items(turn: Turn | None) -> list[Item]:
    """Return all items up to a turn's answer, in order."""
    turns: list[Turn] = []
    while turn is not None:
        turns.append(turn)
        turn = turn.before
    return [item for each in reversed(turns) for item in _items(each.inputs) + _items(each.outputs)]


def input_items(turn: Turn) -> list[Item]:
    """Return all items that a turn answered, in order."""
    return [*earlier_items(turn.before), *_items(turn.inputs)]


def _items(encoded: bytes) -> list[Any]:
    return msgspec.json.decode(encoded, type=list[Any])


routes = Routes("OpenAI")

MOST_ITEMS = 100


def store_of(request: Request) -> ResponseStore:
    """Return the app's store."""
    store: ResponseStore = request.app.state.responses
    return store


def not_stored(response_id: str, param: str) -> HttpProblem:
    """Return the 404 of a response that is not stored."""
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
    """Return a stored response."""
    _check_query(request)
    return Response(_found(request).body, media_type="application/json")


@routes.delete("/v1/responses/{response_id}")
async def delete_response(request: Request) -> Response:
    """Delete a response; later turns keep its items."""
    _check_query(request)
    response_id = request.path_params["response_id"]
    if not store_of(request).remove(current_tenant.get().id, response_id):
        raise not_stored(response_id, "response_id")
    content = {"id": response_id, "object": "response", "deleted": True}
    return Response(msgspec.json.encode(content), media_type="application/json")


@routes.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request) -> Response:
    """Return an error: a response is cancelled by closing its connection."""
    _check_query(request)
    _found(request)
    allowed = "a background response, which this server does not support: disconnect to cancel"
    raise InvalidParameter("response_id", request.path_params["response_id"], allowed)


@routes.get("/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request) -> Response:
    """Return the input items of a response in pages, earlier turns included."""
    _check_query(request, "after", "limit", "order")
    after, limit, order = map(request.query_params.get, ("after", "limit", "order"))
    turn = _found(request).turn
    most = _limit(limit)
    items = await service_of(request).llm.cpu_pool.run(size_of(turn), input_items, turn)
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
            allowed = f"only {', '.join(known)}" if known else "no query parameters"
            raise InvalidParameter(shortened(name, MAX_NAME), value, allowed)
