"""Middleware of the router: ids and logs, errors, API keys, origins, turns."""

from __future__ import annotations

import hmac
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.types import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
)

from tandem.base.listening import is_loopback
from tandem.protocol.context import Route, Shape
from tandem.protocol.names import (
    HEADER_CANARY,
    HEADER_DECODE_REVISION,
    HEADER_PREFILL_REVISION,
    HEADER_SHAPE,
)
from tandem.router.config import RouterConfig
from tandem.router.dispatch.admission import Turns
from tandem.router.http.access import Access, Authorizer, RouteTable
from tandem.router.http.errors import (
    ErrorAnswer,
    HttpProblem,
    answer_of,
    bad_request,
    error_body,
    not_authorized,
    shortened,
)
from tandem.router.metrics import RouterMetrics
from tandem.router.observe.timeline.recorder import ASKED, Recorder, header_of
from tandem.router.tenant import Tenant, current_tenant

access_logger = logging.getLogger("tandem.access")
_SAFE = "/:@!$&'()*+,;=~"
"""Characters of a path in a log line, besides letters, digits and -._.

Others might begin a new line or a terminal's command.
"""


MAX_REQUEST_ID = 256


def is_request_id(value: str) -> bool:
    """Return whether an id may be echoed and logged."""
    return 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.isprintable()


def _given_id(scope: Scope) -> str | None:
    """Return the client's id, if it may be echoed."""
    given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
    text = given.decode("latin-1")
    return text if is_request_id(text) else None


def _template(scope: Scope, default: str) -> str:
    """Return the template of the route: paths of clients are unbounded."""
    template: str = getattr(scope.get("route"), "path", default)
    return template


class Trace:
    """Outermost layer, which sees all answers."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: RouterMetrics,
        *,
        log: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self._app = app
        self._recorder = recorder
        self._metrics = metrics
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = _given_id(scope) or os.urandom(16).hex()
        state["arrived"] = started = time.monotonic()
        state["send_part"] = send
        recording = None
        if self._recorder is not None:
            recording = self._recorder.open(scope, state["request_id"], started)
        state["recording"] = recording
        wants = recording is not None and dict(scope["headers"]).get(ASKED) == b"1"
        state["wants_timeline"] = wants

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
                if ignored := state.get("ignored"):
                    headers.append((b"x-tandem-ignored", ", ".join(ignored).encode()))
                    self._metrics.hints_ignored(ignored)
                if recording is not None:
                    recording.request_id = state["request_id"]
                    recording.status = message["status"]
                    if wants and not state.get("streams"):
                        headers.append(header_of(recording))
                message = {**message, "headers": headers}
                self._answered(scope, message["status"], started)
            await send(message)

        try:
            await self._app(scope, receive, answered)
        finally:
            del state["send_part"]  # refers to the scope that has it
            if recording is not None and self._recorder is not None:
                recording.route = _template(scope, "")
                self._recorder.close(recording)

    def _answered(self, scope: Scope, status: int, started: float) -> None:
        if scope["state"].get("route") is not None:
            return
        self._metrics.http_answered(_template(scope, "none"), status)
        if self._log:
            access_logger.info(
                "%s %s %d %.1f ms",
                scope["method"],
                quote(scope["path"], safe=_SAFE, errors="replace"),
                status,
                (time.monotonic() - started) * 1000,
            )


async def send_error(scope: Scope, send: Send, answer: ErrorAnswer) -> None:
    """Send the whole answer."""
    body = error_body(scope, answer)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        **answer.headers,
    }
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class InTurn:
    """A POST takes a turn before the application reads it."""

    def __init__(self, app: ASGIApp, turns: Turns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            await self._turns.take()
        await self._app(scope, receive, send)


logger = logging.getLogger(__name__)


class Unexpected:
    """Innermost layer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope.get("route"))
            await send_error(scope, send, answer_of(error))


EXPOSED = ("X-Request-Id", "X-Tandem-Ignored", "Retry-After")
"""Headers of answers that scripts may read."""


def cors_options(config: RouterConfig) -> dict[str, Any]:
    """Return the arguments of ``CORSMiddleware``."""
    return {
        "allow_origins": config.allowed_origins,
        "allow_methods": ("*",),
        "allow_headers": ("*",),
        "allow_credentials": config.allow_credentials,
        "expose_headers": EXPOSED,
    }


class RootPath:
    """Removes ``--root-path`` from paths; others are served unchanged. Runs first."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix
        self._raw_prefix = prefix.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self._prefix + "/"):
            raw = scope["raw_path"].removeprefix(self._raw_prefix)
            path = scope["path"].removeprefix(self._prefix)
            scope = {**scope, "path": path or "/", "raw_path": raw or b"/"}
        await self._app(scope, receive, send)


_DEFAULT_PORTS = {"http": "80", "https": "443"}
_MOST_SHOWN = 128


class Origins:
    """Allowed hosts and origins of requests."""

    def __init__(self, config: RouterConfig) -> None:
        self.is_loopback = is_loopback(config.host)
        self._hosts = {_bare(host) for host in (config.host, *config.allowed_host)}
        self._origins = frozenset(each.lower() for each in config.allowed_origins)

    def check_host(self, scope: Scope) -> None:
        """Raise HttpProblem if a request was sent to another host."""
        for host in _values(scope, b"host"):
            name = _bare(_split(host)[0])
            if not (is_loopback(name) or name.endswith(".localhost") or name in self._hosts):
                raise HttpProblem(_foreign("Host", host, "host_not_allowed", "--allowed-host"))

    def check_origin(self, scope: Scope, *, by_name: bool = False) -> None:
        """Raise HttpProblem for a page of another origin that is not allowed.

        ``by_name``: the origin must be allowed by its name.
        """
        if not by_name and "*" in self._origins:
            return
        hosts = _values(scope, b"host")
        for origin in _values(scope, b"origin"):
            if origin.lower() not in self._origins and not _is_same(origin, hosts):
                flag = "--allowed-origins"
                raise HttpProblem(_foreign("Origin", origin, "origin_not_allowed", flag))


class OwnPagesOnly:
    """Layer of a router that listens on a loopback address."""

    def __init__(self, app: ASGIApp, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Return name and port of ``name:port``; an empty port if there is none."""
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        return host, ""
    return name, port


def _is_same(origin: str, hosts: Sequence[str]) -> bool:
    """Return whether the request's host served the page."""
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


_TOKEN = HEADER_CANARY.lower().encode()


class Canary:
    """Check of canaries. Without a token file all are refused."""

    def __init__(self, token_file: str | None) -> None:
        self._token_file = Path(token_file) if token_file else None

    def check(self, access: Access, scope: Scope, headers: Mapping[bytes, bytes]) -> Tenant | None:
        """Return the canary's tenant and set its route, if its token is valid for this class.

        Raises HttpProblem for a wrong token or an impossible route.
        """
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

    def with_route_headers(self, scope: Scope, send: Send) -> Send:
        """Return ``send``; for a canary with headers that name its route."""
        route: Route | None = scope["state"].get("route")
        return send if route is None else _with_route_headers(route, send)

    def _is_right(self, token: bytes) -> bool:
        try:
            known = self._token_file.read_bytes().strip() if self._token_file else b""
        except OSError:
            return False
        return bool(known) and hmac.compare_digest(token, known)


def _text(headers: Mapping[bytes, bytes], name: str) -> str | None:
    value = headers.get(name.lower().encode())
    return None if value is None else value.decode("latin-1")


def _with_route_headers(route: Route, send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start" and route.served_shape is not None:
            headers = {
                HEADER_SHAPE: route.served_shape.value,
                HEADER_PREFILL_REVISION: route.served_prefill,
                HEADER_DECODE_REVISION: route.served_decode,
            }
            more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return send_with_headers


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
    """Stores the route and its tenant in the scope."""

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
        await self._app(scope, receive, self._canary.with_route_headers(scope, send))

    def _check(self, access: Access, scope: Scope) -> Tenant:
        headers = dict(scope["headers"])
        if access is Access.ADMIN and not self._authorizer.has_keys:
            self._origins.check_origin(scope, by_name=True)
        canary = self._canary.check(access, scope, headers)
        return canary or self._authorizer.check(access, headers)


_CONTROL_IN_PATH = bad_request("The path has a control character", "path")
