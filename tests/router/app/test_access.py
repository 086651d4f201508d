"""Every route, in many spellings, with every kind of key: a key opens what it is for, alone.

The app is real, and so is its HTTP: only the endpoints are replaced, by one that answers with the
route that was to run.
"""

from __future__ import annotations

import itertools
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.router.http_server import Served

from tandem.protocol.names import HEADER_CANARY

pytestmark = pytest.mark.full

OPEN = {
    *("GET /", "GET /health", "GET /live", "GET /ping", "POST /ping", "GET /ready", "GET /load"),
    *("GET /version", "GET /metrics", "GET /docs", "GET /redoc"),
}
ADMIN = {
    *("GET /server_info", "GET /log_level", "POST /log_level", "POST /abort_requests"),
    *("POST /reset_prefix_cache", "POST /flush_cache", "POST /start_profile", "POST /stop_profile"),
    *("POST /sleep", "POST /wake_up", "GET /is_sleeping"),
}
CANARY = {
    *("POST /v1/completions", "POST /v1/embeddings", "POST /classify", "POST /v1/score"),
    *("POST /score", "GET /debug/fleet"),
}
KEYS = {
    "none": {},
    "tenant": {"Authorization": "Bearer tenant"},
    "tenant by x-api-key": {"x-api-key": "tenant"},
    "admin": {"Authorization": "Bearer admin"},
    "wrong": {"Authorization": "Bearer wrong"},
    "canary": {HEADER_CANARY: "sesame"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "both keys": {"api_key": ("tenant",), "admin_api_key": ("admin",)},
    "API keys alone": {"api_key": ("tenant",)},
    "admin keys alone": {"admin_api_key": ("admin",)},
    "no keys": {},
    "open administration": {"enable_admin_api": True},
}
STRANGERS = ("none", "tenant", "canary")
"""Keys that do not open all: what they may not open is asked for in all spellings."""
SHARE = {**dict.fromkeys(SETTINGS, 3), "both keys": 1}
"""One spelling of so many is tried: all of them where there are both keys."""
LEAST = {"both keys": 6_000, "open administration": 300}
"""Requests of a matrix: with open administration there is nothing that a key may not open."""
PIPELINED = 8
Asked = tuple[Callable[[list[bytes]], list["Ran"]], list[str]]


class Ran(NamedTuple):
    status: int
    route: str
    """Empty for a request that was refused."""


def spellings(path: str) -> Iterator[str]:
    """Targets that are, or that some server could take for, this path."""
    head, last = path[:-1], path[-1]
    yield path
    yield path + "?x=1"
    for end in (
        *("%0a", "%0d", "%0d%0a", "%0A", "%09", "%00", "%20", "%0b", "%0c", "%7f", "%c2%85"),
        *("%e2%80%a8", "%a0", "%ff", "%250a", "/", "//", "%2f", "%2F", "/%0a", "%0a/", "%5c"),
        *(";", ";a=b", "%3b", "%3ba=b", "%3f", "%23", "#x", ".", "%2e", "/.", "/..", "/%2e"),
        *(".json", "%20%0a", "+", "/x", "%0ax", "%09/x"),
    ):
        yield path + end
    for start in (
        *("/", "/.", "/./.", "/..", "/x/..", "/%2e", "/%2e%2e", "/x/%2e%2e", "/.;", "/..;"),
        *("/health/..", "/health/..;", "/health;", "/metrics/%2e%2e", "/v1/models/..", "/%2f"),
        *("/v1/models/..%2f..", "/ui/..", "/%0a", "/%09", "/%00", "/;", "/;x=y", "/%5c", "/%20"),
        *("http://localhost", "http://127.0.0.1:1/x/..", "//localhost"),
    ):
        yield start + path
    yield from {path.upper(), path.title(), path.swapcase()} - {path}
    yield f"{path[:1]}%{ord(path[1:2] or '/'):02x}{path[2:]}" if len(path) > 1 else "/%2f"
    yield f"{head}%{ord(last):02X}"
    yield "".join(f"%{ord(each):02x}" if each != "/" else each for each in path)
    yield path.replace("/", "%2f").replace("%2f", "/", 1)
    yield path.replace("/", "//")
    yield path.replace("_", "-")
    yield path.replace("_", "%5f")


def named(router: ASGIApp) -> ASGIApp:
    """What stands in the place of the endpoints: it names the route that was to run."""

    async def name_route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await router(scope, receive, send)
            return
        route = scope["route"]
        if route is None or scope["method"] not in route.methods:
            answer = Response(status_code=404 if route is None else 405)
        else:
            answer = Response(headers={"x-ran": f"{scope['method']} {route.path}"})
        await answer(scope, receive, send)

    return name_route


@pytest.fixture
def asked(serve: Callable[..., Served], tmp_path: Path) -> Callable[..., Asked]:
    """Start a router, and return what sends requests to it, and its routes."""

    def start(**settings: Any) -> Asked:
        token = tmp_path / "token"
        token.write_text("sesame")
        served = serve(wait=False, canary_token_file=str(token), **settings)
        router: Any = served.app.router
        router.middleware_stack = named(served.app.router.app)
        served.app.middleware_stack = None  # built anew, around what stands there now
        served.wait_started()
        return lambda requests: list(answers(served, requests)), routes_of(served.app)

    return start


def answers(served: Served, requests: list[bytes]) -> Iterator[Ran]:
    """Send the requests, some at a time; one by one if one of them ends the connection."""
    address = served.socket.getsockname()
    at, most = 0, PIPELINED
    while at < len(requests):
        some = requests[at : at + most]
        with socket.create_connection(address, timeout=60) as wire, wire.makefile("rb") as read:
            wire.sendall(b"".join(some))
            found = list(itertools.takewhile(bool, (answer_of(read) for _ in some)))
        assert found or most > 1, f"no answer to {some[0]!r}"
        yield from filter(None, found)
        at += len(found)
        most = PIPELINED if len(found) == len(some) else 1


def answer_of(read: Any) -> Ran | None:
    """One answer; None if the connection has ended."""
    first = read.readline()
    if not first:
        return None
    headers = {}
    while (line := read.readline()) not in (b"\r\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    read.read(int(headers.get("content-length", 0)))
    return Ran(int(first.split()[1]), headers.get("x-ran", ""))


def request(method: str, target: str, key: str) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", "Content-Length: 0"]
    lines += [f"{name}: {value}" for name, value in KEYS[key].items()]
    return "\r\n".join([*lines, "", ""]).encode()


def may(setting: str, key: str, route: str) -> bool:
    has_keys = setting in ("both keys", "API keys alone")
    is_admin = key == "admin" and setting in ("both keys", "admin keys alone")
    if route in OPEN or route.startswith("GET /ui") or is_admin:
        return True
    if route in ADMIN:
        return setting == "open administration"
    if key == "canary" and route in CANARY:
        return True
    return not has_keys or key in ("tenant", "tenant by x-api-key")


def routes_of(app: Starlette) -> list[str]:
    routes = [route for route in app.routes if isinstance(route, Route)]
    return [f"{method} {each.path}" for each in routes for method in sorted(each.methods or ())]


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_key_opens_its_routes_alone_however_they_are_spelled(
    asked: Callable[..., Asked], setting: str
) -> None:
    """The matrix. The route that runs is one that the key opens; the plain spelling runs it."""
    ask, routes = asked(**SETTINGS[setting])
    assert set(routes) >= OPEN | ADMIN | CANARY, "this test knows a route that does not exist"
    cases, requests = [], []
    for route, key in itertools.product(routes, KEYS):
        method, _, path = route.partition(" ")
        path = path.replace("{model_id:path}", "m").replace("{request_id:path}", "r")
        path = path.replace("{response_id}", "resp")
        is_guarded = route in ADMIN | CANARY or setting == "both keys"
        is_spelled = key in STRANGERS and is_guarded and not may(setting, key, route)
        targets = list(dict.fromkeys(spellings(path)))[:: SHARE[setting]] if is_spelled else [path]
        for target in targets:
            cases.append((route, key, path, target))
            requests.append(request(method, target, key))
    counts: Counter[str] = Counter()
    for (route, key, path, target), ran in zip(cases, ask(requests), strict=True):
        where = f"{setting}: {route} as {target!r} with {key}: {ran}"
        counts[str(ran.status)] += 1
        if ran.route:
            assert may(setting, key, ran.route), where
        else:
            assert ran.status in (400, 401, 403, 404, 405), where
        if target == path:
            assert (ran.route == route) == may(setting, key, route), where
            if not ran.route:
                assert ran.status in (401, 403), where
    print(f"{setting}: {len(requests)} requests, {len(routes)} routes, answers {dict(counts)}")
    assert len(requests) > LEAST.get(setting, 700)
