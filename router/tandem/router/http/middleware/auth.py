"""Matches a request to its route and checks that the caller may use it, before anything is read.

The route that was matched here is the one that runs (``routes``): a path that is spelled in an
unusual way can never be checked as one route and answered by another.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from starlette.types import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
)

from tandem.protocol.context import Route, Shape
from tandem.protocol.names import (
    HEADER_CANARY,
    HEADER_DECODE_REVISION,
    HEADER_PREFILL_REVISION,
    HEADER_SHAPE,
)
from tandem.router.http.access import Access, Authorizer
from tandem.router.http.errors import (
    ErrorAnswer,
    HttpProblem,
    bad_request,
    not_authorized,
)
from tandem.router.http.middleware.errors import send_error
from tandem.router.http.middleware.origins import Origins
from tandem.router.http.routes import RouteTable
from tandem.router.tenant import Tenant, current_tenant

_TOKEN = HEADER_CANARY.lower().encode()


class Canary:
    """Without a token file every canary is refused."""

    def __init__(self, token_file: str | None) -> None:
        self._token_file = Path(token_file) if token_file else None

    def check(self, access: Access, scope: Scope, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """Return the canary's tenant, and put its way into the scope, if its token opens a route of
        this class. Raises HttpProblem for a wrong token and a way that does not exist."""
        token = headers.get(_TOKEN)
        if token is None:
            return None
        if not self._is_right(token):
            raise HttpProblem(not_authorized())
        if access is not Access.CANARY:
            return None
        shape = _text(headers, HEADER_SHAPE)
        if shape is not None and shape not in list(Shape):
            raise HttpProblem(_unknown_shape(shape))
        scope.setdefault("state", {})["route"] = Route(
            shape=Shape(shape) if shape else None,
            prefill_revision=_text(headers, HEADER_PREFILL_REVISION),
            decode_revision=_text(headers, HEADER_DECODE_REVISION),
        )
        return Tenant.from_key(token)

    def telling(self, scope: Scope, send: Send) -> Send:
        """Return ``send``; for a canary with headers added that name the way it took."""
        route: Route | None = scope["state"].get("route")
        return send if route is None else _telling(route, send)

    def _is_right(self, token: bytes) -> bool:
        try:
            known = self._token_file.read_bytes().strip() if self._token_file else b""
        except OSError:
            return False
        return bool(known) and hmac.compare_digest(token, known)


def _text(headers: Mapping[bytes, bytes], name: str) -> str | None:
    value = headers.get(name.lower().encode())
    return None if value is None else value.decode("latin-1")


def _telling(route: Route, send: Send) -> Send:
    async def told(message: Message) -> None:
        if message["type"] == "http.response.start" and route.served_shape is not None:
            said = {
                HEADER_SHAPE: route.served_shape.value,
                HEADER_PREFILL_REVISION: route.served_prefill,
                HEADER_DECODE_REVISION: route.served_decode,
            }
            more = [(name.lower().encode(), value.encode()) for name, value in said.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return told


def _unknown_shape(shape: str) -> ErrorAnswer:
    allowed = " or ".join(Shape)
    return ErrorAnswer(
        status=400,
        message=f"{HEADER_SHAPE}: {shape!r} is not allowed; {allowed}",
        type="invalid_request_error",
        param=HEADER_SHAPE,
    )


_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Authorization:
    """Puts the route, and the tenant for which it runs, into the scope."""

    def __init__(
        self,
        app: ASGIApp,
        routes: RouteTable,
        authorizer: Authorizer,
        canary: Canary,
        origins: Origins,
    ) -> None:
        self._app = app
        self._routes = routes
        self._authorizer = authorizer
        self._canary = canary
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            if _CONTROL.search(scope["path"]):
                raise HttpProblem(_CONTROL_IN_PATH)
            access = self._routes.match(scope)
            tenant = self._check(access, scope)
        except HttpProblem as problem:
            await send_error(scope, send, problem.answer)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        current_tenant.set(tenant)
        await self._app(scope, receive, self._canary.telling(scope, send))

    def _check(self, access: Access, scope: Scope) -> Tenant:
        headers = dict(scope["headers"])
        if access is Access.ADMIN and not self._authorizer.has_keys:
            self._origins.check_origin(scope, by_name=True)
        canary = self._canary.check(access, scope, headers)
        return canary or self._authorizer.check(access, headers)


_CONTROL_IN_PATH = bad_request("The path has a control character", "path")
