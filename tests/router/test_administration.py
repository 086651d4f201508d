"""What changes a server for everybody asks for keys of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]


@pytest.mark.parametrize(
    ("keys", "given", "status"),
    [
        ({}, None, 200),
        ({"api_key": ("c",)}, "c", 403),
        ({"api_key": ("c",)}, None, 403),
        ({"api_key": ("c",), "admin_api_key": ("a",)}, "c", 401),
        ({"api_key": ("c",), "admin_api_key": ("a",)}, "a", 200),
        ({"admin_api_key": ("a",)}, None, 401),
        ({"admin_api_key": ("b", "a")}, "a", 200),
    ],
)
def test_administration_has_keys_of_its_own(
    serve: Serve, decode: Make, keys: dict[str, Any], given: str | None, status: int
) -> None:
    """A client's key opens it nowhere; the document says what is answered."""
    served = serve(decode(), wait=False, **keys)
    wait_for(lambda: httpx.get(served.url + "/ready").status_code == 200)
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    answer = served.post("/reset_prefix_cache", headers=headers)
    assert answer.status_code == status, answer.text
    opener = {"Authorization": f"Bearer {(*keys.get('admin_api_key', ()), 'c')[0]}"}
    document = httpx.get(served.url + "/openapi.json", headers=opener).json()
    assert str(status) in document["paths"]["/reset_prefix_cache"]["post"]["responses"]
    models = httpx.get(served.url + "/v1/models", headers=opener)
    assert models.status_code == 200, "an admin's key opens all else"
