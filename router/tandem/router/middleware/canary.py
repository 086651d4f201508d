"""Routes the operator's canary by its own choice of workers, and reports the route taken.

The token is read from its file at each use: it may be replaced while the router runs. It gives
access to the paths of the canary (``Access.CANARY``) and to nothing else. A request with a wrong
token is refused, so that no ordinary answer is taken for a canary's.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from starlette.types import Message, Scope, Send

from tandem.protocol.context import Route, Shape
from tandem.protocol.names import (
    HEADER_CANARY,
    HEADER_DECODE_REVISION,
    HEADER_PREFILL_REVISION,
    HEADER_SHAPE,
)
from tandem.router.access import Access
from tandem.router.openai.errors import ErrorAnswer, HttpProblem, not_authorized
from tandem.router.tenant import Tenant

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
