"""--root-path: a proxy in front may pass its own path prefix on."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.protocol.errors import InvalidParameter
from tandem.router.config import RouterConfig

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


def test_routes_are_served_below_the_prefix_and_without_it(serve: Serve, decode: Make):
    """Proxies that strip their prefix and proxies that pass it on both work."""
    served = serve(decode(), root_path="/team/llm")
    for prefix in ("", "/team/llm"):
        assert httpx.get(f"{served.url}{prefix}/v1/models").status_code == 200
        body = {"prompt": [1, 2], "max_tokens": 2}
        answer = httpx.post(f"{served.url}{prefix}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
    assert httpx.get(f"{served.url}/team/llm").json()["name"] == "tandem"
    assert httpx.get(f"{served.url}/team/llmx/v1/models").status_code == 404
    document = httpx.get(f"{served.url}/team/llm/openapi.json").json()
    assert document["servers"] == [{"url": "/team/llm"}]


def test_a_prefix_opens_no_route(serve: Serve, decode: Make):
    """Access goes by the route after the prefix was stripped."""
    keys = {"api_key": ("k",), "admin_api_key": ("a",)}
    served = serve(decode(), wait=False, root_path="/llm", **keys)
    for path in ("/llm/sleep", "/llm/llm/sleep", "/llm//sleep", "/llm/v1/models"):
        assert httpx.post(f"{served.url}{path}").status_code in (401, 404, 405), path
    headers = {"Authorization": "Bearer k"}
    assert httpx.post(f"{served.url}/llm/sleep", headers=headers).status_code == 401


@pytest.mark.parametrize("value", ["llm", "/", "/llm/", "/a b", "/a/../b", "//a", "/a?b", "/%61"])
def test_a_prefix_that_is_not_a_path_is_refused(value: str):
    """The message names the setting and what is allowed."""
    with pytest.raises(InvalidParameter, match="root_path"):
        RouterConfig(model="m", root_path=value)
