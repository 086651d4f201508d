"""Routes with their access classes, and the one place that matches paths to them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.router.http.access import Access


class RouteTable:
    """Matches a request once: the route that was matched is the one that ``Dispatch`` runs."""

    def __init__(self, routes: Sequence[tuple[BaseRoute, Access]]) -> None:
        self._routes = routes

    def match(self, scope: Scope) -> Access:
        """Put the route of a request into the scope, and return its access class.

        A path without a route has the class of clients' routes, so that it requires a key.
        """
        partial: tuple[BaseRoute, Access, Scope] | None = None
        for route, access in self._routes:
            match, child_scope = route.matches(scope)
            if match is Match.FULL or (match is Match.PARTIAL and partial is None):
                partial = route, access, child_scope
            if match is Match.FULL:
                break
        if partial is None:
            scope["route"] = None
            return Access.CLIENT
        route, access, child_scope = partial
        scope.update(child_scope)
        scope["route"] = route
        return access

    def methods(self, scope: Scope) -> list[str]:
        """Return the methods of all routes of a path."""
        met = [route for route, _ in self._routes if route.matches(scope)[0] is not Match.NONE]
        found = [route.methods or () for route in met if isinstance(route, Route)]
        return sorted({method for methods in found for method in methods})


class Dispatch:
    """Runs the route that was matched when the caller's access was checked, and matches nothing
    itself: in the place of the router's own ``app``, which gets the lifespan alone."""

    def __init__(self, router: ASGIApp) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "lifespan":
            await self._router(scope, receive, send)
            return
        route: BaseRoute | None = scope["route"]  # a request without a check has none, and fails
        if route is None:
            raise HTTPException(404)
        await route.handle(scope, receive, send)
