"""Refuses requests that a web page may send through the browser of a user on the router's host.

On a loopback address the router trusts every request that reaches it, and a browser reaches it from
any page. Such a request has the page's ``Origin``, or, after DNS rebinding, the page's ``Host``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.types import (
    ASGIApp,
    Receive,
    Scope,
    Send,
)

from tandem.base.listening import is_loopback
from tandem.router.config import RouterConfig
from tandem.router.http.errors import ErrorAnswer, HttpProblem, shortened
from tandem.router.http.middleware.errors import send_error

EXPOSED = ("X-Request-Id", "X-Tandem-Ignored", "Retry-After")
"""Headers of answers that scripts may read in addition to those that browsers always expose."""


def cors_options(config: RouterConfig) -> dict[str, Any]:
    """Return the arguments of Starlette's ``CORSMiddleware``."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": config.allowed_methods,
        "allow_headers": config.allowed_headers,
        "allow_credentials": config.allow_credentials,
        "expose_headers": EXPOSED,
    }


class RootPath:
    """Strips ``--root-path`` from the paths of requests; paths without it are served as they are.

    Runs first, so that everything after it sees one spelling of a path.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._raw_prefix = prefix.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._prefix + "/"):
            raw = scope["raw_path"].removeprefix(self._raw_prefix)
            path = scope["path"].removeprefix(self._prefix)
            scope = {**scope, "path": path or "/", "raw_path": raw or b"/"}
        await self._app(scope, receive, send)


_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MOST_SHOWN = 128


class Origins:
    """The hosts and origins that requests may come with."""

    def __init__(self, config: RouterConfig) -> None:
        self.is_loopback = is_loopback(config.host)
        self._hosts = {_bare(host) for host in (config.host, *config.allowed_host)}
        self._origins = frozenset(each.lower() for each in config.allowed_origins)

    def check_host(self, scope: Scope) -> None:
        """Raise HttpProblem if a request was sent to a host that is not this one's."""
        for host in _values(scope, b"host"):
            name = _bare(_split(host)[0])
            if not (is_loopback(name) or name.endswith(".localhost") or name in self._hosts):
                raise HttpProblem(_foreign("Host", host, "host_not_allowed", "--allowed-host"))

    def check_origin(self, scope: Scope, *, by_name: bool = False) -> None:
        """Raise HttpProblem if a request comes from a page of another origin that is not allowed.

        ``by_name``: that any origin is allowed is not enough.
        """
        if not by_name and "*" in self._origins:
            return
        hosts = _values(scope, b"host")
        for origin in _values(scope, b"origin"):
            if origin.lower() not in self._origins and not _is_same(origin, hosts):
                flag = "--allowed-origins"
                raise HttpProblem(_foreign("Origin", origin, "origin_not_allowed", flag))


class OwnPagesOnly:
    """The layer around all that answers, for a router that listens on a loopback address."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        if scope["type"] == "http":
            try:
                self._origins.check_host(scope)
                self._origins.check_origin(scope)
            except HttpProblem as problem:
                await send_error(scope, send, problem.answer)
                return
        await self._app(scope, receive, send)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1").strip() for key, value in scope["headers"] if key == name]


def _bare(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _split(host: str) -> tuple[str, str]:
    """Return the name and the port of ``name:port``; an empty port if there is none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, ""
    return name, port


def _is_same(origin: str, hosts: Sequence[str]) -> bool:
    """Return whether a page of this origin was served by the request's host."""
    scheme, found, rest = origin.lower().partition("://")
    default = _DEFAULT_PORTS.get(scheme)
    if not found or default is None:
        return False
    name, port = _split(rest)
    own = [_split(host.lower()) for host in hosts]
    return [(name, port or default)] == [(host, number or default) for host, number in own]


def _foreign(header: str, value: str, code: str, flag: str) -> ErrorAnswer:
    return ErrorAnswer(
        status=403,
        message=f"{header}: {shortened(value, _MOST_SHOWN)!r} is not allowed; "
        f"this server's own, or one of {flag}",
        type="invalid_request_error",
        param=header,
        code=code,
    )
