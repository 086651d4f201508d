"""Refuses requests that a web page may send through the browser of a user on the router's host.

On a loopback address the router trusts every request that reaches it, and a browser reaches it from
any page. Such a request has the page's ``Origin``, or, after DNS rebinding, the page's ``Host``.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.protocol.exposure import is_loopback
from tandem.router.config import RouterConfig
from tandem.router.middleware.answer import send_error
from tandem.router.openai.errors import ErrorAnswer, HttpProblem
from tandem.router.openai.written import shortened

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
