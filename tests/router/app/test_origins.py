"""A router on a loopback address answers no foreign page: neither its origin nor its host."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.router.app import create_app
from tandem.router.config import RouterConfig

pytestmark = pytest.mark.full

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
PATHS = [
    *(("GET", "/"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/server_info")),
    *(("POST", "/sleep"), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nowhere")),
    *(("OPTIONS", "/v1/chat/completions"), ("GET", "/ui"), ("DELETE", "/v1/responses/resp_1")),
]
FOREIGN_HOSTS = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("0.0.0.0", "notlocalhost", "10.0.0.1:80", "[fe80::1]:80", "x", "", "localhost@evil.example"),
    *("evil.example, localhost", "127.0.0.1:80:evil.example"),
]
OWN_HOSTS = [
    *("localhost", "LOCALHOST:1", "localhost.", "a.localhost:8000", "127.0.0.1", "127.8.9.1:80"),
    *("[::1]:8000", "router.internal", "router.internal:8000"),
]
FOREIGN_ORIGINS = [
    *("https://evil.example", "null", "http://localhost:3000", "file://", "http://localhost"),
    *("https://evil.example:8000", "chrome-extension://abc", "http://127.0.0.1:1", "*", "garbage"),
]


def statuses(served: Served, **headers: str) -> set[int]:
    found = set()
    with httpx.Client(verify=clear_text.NO_TLS) as client:
        for method, path in PATHS:
            for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
                answer = client.request(
                    method,
                    served.url + path,
                    content=b"",
                    headers={"Content-Type": kind, **headers},
                )
                found.add(answer.status_code)
                if answer.status_code == 403 and "not_allowed" in answer.text:
                    assert answer.json()["error"]["param"] in ("Host", "Origin")
                    assert "--allowed-" in answer.json()["error"]["message"]
    return found


@pytest.fixture
def served(serve: Serve) -> Served:
    """A router that anyone who reaches it may administer, for a page that it knows."""
    made = serve(
        wait=False,
        enable_admin_api=True,
        allowed_host=("router.internal",),
        allowed_origins=("https://chat.example",),
    )
    made.wait_started()
    return made


def test_foreign_hosts_and_origins_are_refused_everywhere(served: Served) -> None:
    """403 on every path, whatever type its body says it has; own ones are answered."""
    for host in FOREIGN_HOSTS:
        assert statuses(served, Host=host) == {403}, host
    for origin in FOREIGN_ORIGINS:
        assert statuses(served, Origin=origin) == {403}, origin
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "AAA"}
    assert statuses(served, Origin="https://evil.example", **upgrade) == {403}
    for host in OWN_HOSTS:
        assert 403 not in statuses(served, Host=host), host
    for origin in ("https://chat.example", "HTTPS://chat.example", served.url):
        assert 403 not in statuses(served, Origin=origin), origin


def test_any_origin_is_not_enough_for_administration_without_keys(serve: Serve) -> None:
    """--allowed-origins * opens what clients may do, and no more."""
    served = serve(wait=False, enable_admin_api=True, allowed_origins=("*",))
    served.wait_started()
    headers = {"Origin": "https://evil.example"}
    assert served.post("/sleep", headers=headers).status_code == 403
    assert clear_text.get(served.url + "/server_info", headers=headers).status_code == 403
    assert clear_text.get(served.url + "/v1/models", headers=headers).status_code == 200
    assert served.post("/sleep").status_code == 503, "no worker is up"


@pytest.mark.parametrize(("host", "keys"), [*itertools.product(["0.0.0.0", "::"], [False, True])])
def test_pages_administer_no_router_that_listens_for_all(
    small_model: Any, host: str, keys: bool
) -> None:
    """Any Host is answered; a foreign Origin opens no administration that needs no key."""
    more: dict[str, Any] = {"admin_api_key": ("a",)} if keys else {"enable_admin_api": True}
    app = create_app(RouterConfig(model=str(small_model), host=host, **more))
    transport = httpx.ASGITransport(app)

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=transport, base_url="http://public.example") as http:
            foreign = {"Origin": "https://evil.example", "Authorization": "Bearer a"}
            paths = ("/version", "/v1/models", "/log_level")
            return [(await http.get(path, headers=foreign)).status_code for path in paths]

    assert asyncio.run(ask()) == [200, 200, 200 if keys else 403]


def test_redirects_do_not_exist(served: Served) -> None:
    """A path with a slash too many is 404, and names no host."""
    for path in ("/health/", "/v1/chat/completions/", "/debug/fleet/", "//evil.example/health"):
        answer = clear_text.get(served.url + path, headers={"Host": "router.internal"})
        assert answer.status_code in (404, 405), path
        assert "location" not in answer.headers
