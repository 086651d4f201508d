"""Web pages of other origins: nothing by default, what the flags say otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
PAGE = "https://chat.example"
CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}


def preflight(served: Served, origin: str = PAGE, method: str = "POST") -> httpx.Response:
    return httpx.options(
        served.url + "/v1/chat/completions",
        headers={
            "Origin": origin,
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization, content-type",
        },
    )


def test_no_page_may_ask_by_default(well: Served) -> None:
    """Preflight is refused and no answer bears a header that a browser looks for."""
    answer = well.post("/v1/chat/completions", json=CHAT, headers={"Origin": PAGE})

    assert answer.status_code == 403
    assert preflight(well).status_code == 403
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_pages_of_an_allowed_origin_may_ask(serve: Serve, decode: Make) -> None:
    """Preflight needs no key; every answer may be read, an error and a refused key, too."""
    served = serve(decode(), allowed_origins=(PAGE,), api_key=("k",), wait=False)
    served.wait_started()
    asked = preflight(served)
    keyless = served.post("/v1/chat/completions", json=CHAT, headers={"Origin": PAGE})
    headers = {"Origin": PAGE, "Authorization": "Bearer k"}
    wrong = served.post("/v1/chat/completions", json={}, headers=headers)
    nowhere = served.post("/nowhere", json={}, headers=headers)

    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "authorization" in asked.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in asked.headers
    statuses = [answer.status_code for answer in (keyless, wrong, nowhere)]
    assert statuses == [401, 400, 404]
    for answer in (keyless, wrong, nowhere):
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_other_pages_may_not(serve: Serve, decode: Make) -> None:
    """Preflight says no; the answer to one who asks all the same is not for the page to read."""
    served = serve(decode(), allowed_origins=(PAGE,), wait=False)
    served.wait_started()
    other = served.post("/v1/chat/completions", json={}, headers={"Origin": "https://evil.example"})

    assert preflight(served, "https://evil.example").status_code == 403
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_an_unforeseen_failure_may_be_read_and_has_an_id(serve: Serve, decode: Make) -> None:
    """500 passes through the same layers as every answer."""
    served = serve(decode(), allowed_origins=("*",), wait=False)
    served.wait_started()
    served.app.state.readiness = None
    answer = clear_text.get(served.url + "/ready", headers={"Origin": PAGE})

    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Internal error of the router"
    assert answer.headers["access-control-allow-origin"] == "*"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"allowed_origins": ("chat.example",)}, "allowed_origins"),
        ({"allowed_origins": ('["*"]',)}, "allowed_origins"),
        ({"allowed_origins": (PAGE + "/",)}, "allowed_origins"),
        ({"allow_credentials": True}, "allow_credentials"),
        ({"allow_credentials": True, "allowed_origins": ("*",)}, "allow_credentials"),
    ],
)
def test_origins_that_no_browser_sends_are_refused(settings: dict[str, Any], param: str) -> None:
    """At the start, by name: a misspelt origin would block pages without a word."""
    with pytest.raises(InvalidParameter) as refused:
        RouterConfig(**settings)

    assert refused.value.param == param


def test_the_root_says_what_this_is(serve: Serve, decode: Make) -> None:
    """Without a key: name, version and where to go on; each place is there."""
    served = serve(decode(), api_key=("k",), wait=False)
    served.wait_started()
    root = served.get("/")

    assert root["name"] == "tandem"
    assert root["version"]
    for place in ("models", "docs", "openapi"):
        with_key = clear_text.get(served.url + root[place], headers={"Authorization": "Bearer k"})
        assert with_key.status_code == 200
