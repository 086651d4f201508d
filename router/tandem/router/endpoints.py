"""Endpoints of a module: routes of one method, with a tag for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Handler = Callable[[Request], Awaitable[Response]]


class Endpoint(Route):
    """Route of one method. Without a tag it is not in the document."""

    def __init__(self, method: str, path: str, handler: Handler, tag: str | None) -> None:
        super().__init__(path, handler, include_in_schema=tag is not None)
        self.methods = {method}  # Starlette adds HEAD to GET
        self.tag = tag


class Routes(list[Endpoint]):
    """Endpoints of a module, in matching order."""

    def __init__(self, tag: str | None = None) -> None:
        super().__init__()
        self._tag = tag

    def get(self, path: str) -> Callable[[Handler], Handler]:
        return self._register("GET", path)

    def post(self, path: str) -> Callable[[Handler], Handler]:
        return self._register("POST", path)

    def delete(self, path: str) -> Callable[[Handler], Handler]:
        return self._register("DELETE", path)

    def _register(self, method: str, path: str) -> Callable[[Handler], Handler]:
        def register(handler: Handler) -> Handler:
            self.append(Endpoint(method, path, handler, self._tag))
            return handler

        return register
