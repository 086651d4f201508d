"""Matches a request to its route and checks that the caller may use it, before anything is read.

The route that was matched here is the one that runs (``routes``): a path that is spelled in an
unusual way can never be checked as one route and answered by another.
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.access import Access, Authorizer
from tandem.router.middleware.answer import send_error
from tandem.router.middleware.canary import Canary
from tandem.router.middleware.origins import Origins
from tandem.router.openai.errors import HttpProblem, bad_request
from tandem.router.routes import RouteTable
from tandem.router.tenant import Tenant, current_tenant

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
