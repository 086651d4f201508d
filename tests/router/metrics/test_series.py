"""How many series a router can have: its labels are never a client's own words."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.router.behaviours import Make
from tests.router.http_server import Served

pytestmark = pytest.mark.full

Serve = Callable[..., Served]

NAMES = 2_000
"""Request ids, tenants and models, each said once."""
THREADS = 8
ANSWERED_IN = 20
"""One call in so many asks for the model that is there and is answered by workers."""
FEW = 400
"""Calls after which every way that these calls can go was gone."""
LIMIT = 600
"""Series of a router, as docs/observability.md promises."""


def calls() -> Iterator[tuple[str, str, dict[str, str], str]]:
    """Method, path, headers and body, no two with one word in common."""
    for number in range(NAMES):
        headers = {"x-request-id": f"id-{number}", "x-tenant": f"tenant-{number}"}
        headers |= {"authorization": f"Bearer key-{number}", "user-agent": f"agent/{number}"}
        body = {"prompt": "Hi", "max_tokens": 1, "user": f"tenant-{number}"}
        if number % ANSWERED_IN:
            body["model"] = f"model-{number}"
        yield "POST", "/v1/completions", headers, json.dumps(body)
        if number % 10 == 0:
            yield "GET", f"/v1/models/model-{number}", headers, ""
            yield "GET", f"/nowhere-{number}", headers, ""
            yield "GET", f"/debug/requests/other-{number}", headers, ""


def send(port: int, asked: list[tuple[str, str, dict[str, str], str]]) -> set[int]:
    """The statuses of calls that are made one after another over one connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    found = set()
    for method, path, headers, body in asked:
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        answer = connection.getresponse()
        answer.read()
        found.add(answer.status)
    connection.close()
    return found


def series(text: str) -> set[tuple[str, ...]]:
    """Names with labels; without the seconds at which counters were made."""
    return {
        (sample.name, *map(str, sorted(sample.labels.items())))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.slow
def test_series_do_not_grow_with_names(serve: Serve, prefill: Make, decode: Make) -> None:
    """Two thousand ids, tenants and models leave what a few hundred left."""
    served = serve(prefill(step=0.0), decode(step=0.0), strict_handoff=True)
    port = served.socket.getsockname()[1]
    every = list(calls())

    first = send(port, list(islice(every, FEW)))
    served.metrics()  # counts itself
    before = series(served.metrics())
    with ThreadPoolExecutor(THREADS) as threads:
        shares = [every[FEW + number :: THREADS] for number in range(THREADS)]
        statuses = set().union(*threads.map(lambda share: send(port, share), shares))

    after = series(served.metrics())
    assert first == {200, 404}
    assert statuses == {200, 404}
    assert after == before
    print(f"series of the router: {len(after)}")
    assert len(after) <= LIMIT


def test_answers_by_status_begin_at_nothing(serve: Serve, decode: Make) -> None:
    """On each path that workers answer: Prometheus sees no increase of a series that begins at 1,
    so the first 503 would be lost. Other paths have a series once somebody has asked."""
    served = serve(decode())
    paths = served.get("/openapi.json")["paths"]
    answered = {
        path for path, each in paths.items() if "504" in each.get("post", {}).get("responses", ())
    }
    text = served.metrics()

    assert len(answered) == 12
    for path, status in product(answered, (200, 429, 500, 503, 504)):
        assert f'http_requests_total{{handler="{path}",status="{status}"}} 0.0' in text
    counted = set(re.findall(r'^http_requests_total\{handler="([^"]+)"', text, re.M))
    assert counted - answered <= {"/debug/fleet", "/openapi.json", "none"}
