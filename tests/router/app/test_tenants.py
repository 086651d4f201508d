"""What a tenant reads is bound to it: cached prefixes, stored responses and records of calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.protocol.errors import RequestRefused
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.api.openai.bodies.embeds import EmbedsIntake
from tandem.router.tenant import Tenant, current_tenant

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
ONE, TWO, ADMIN = "key-one", "key-two", "key-admin"
WORDS = "word " * 300
CHAT = [{"role": "user", "content": WORDS}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": WORDS, "max_tokens": 1},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"input": WORDS, "max_output_tokens": 1},
    "/v1/messages": {"messages": CHAT, "max_tokens": 1, "model": "m"},
}


def served_with_keys(serve: Serve, worker: FakeWorker, **settings: Any) -> Served:
    """A router with two tenants and an administrator."""
    settings.setdefault("served_model_name", ("m",))
    served = serve(worker, api_key=(ONE, TWO), admin_api_key=(ADMIN,), wait=False, **settings)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)
    return served


def ask(served: Served, key: str, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(verify=clear_text.NO_TLS, timeout=60) as client:
        return client.request(method, served.url + path, json=body, headers=headers)


def asked(
    served: Served, worker: FakeWorker, key: str, path: str, **more: Any
) -> EngineCoreRequest:
    """The request that a worker gets for a tenant."""
    answer = ask(served, key, "POST", path, {**BODIES[path], **more})
    assert answer.status_code == 200, answer.text
    return worker.submitted[-1]


@pytest.mark.parametrize("path", BODIES)
def test_tenants_find_none_of_each_others_prefixes(serve: Serve, decode: Make, path: str) -> None:
    """The hashes of the same prompt differ between them, also with the same salt, and are the same
    for one tenant; so what a router knows of caches, and when KV is handed over, differs too."""
    worker = decode()
    served = served_with_keys(serve, worker)
    one, again = (asked(served, worker, ONE, path) for _ in range(2))
    two = asked(served, worker, TWO, path)
    assert one.block_hashes
    assert one.block_hashes == again.block_hashes
    assert not set(one.block_hashes) & set(two.block_hashes)
    assert (one.tenant, two.tenant) == tuple(Tenant.from_key(k.encode()).id for k in (ONE, TWO))
    if path == "/v1/messages":  # has no salts
        return
    salted = [asked(served, worker, key, path, cache_salt="s").block_hashes for key in (ONE, TWO)]
    spelled = asked(served, worker, TWO, path, cache_salt=f"{one.cache_salt}").block_hashes
    assert len({one.block_hashes, two.block_hashes, *salted, spelled}) == 5


def test_prefixes_are_shared_if_the_operator_says_so(serve: Serve, decode: Make) -> None:
    """Then only the salts of clients keep them apart."""
    worker = decode()
    served = served_with_keys(serve, worker, share_prefix_cache=True)
    path = "/v1/completions"
    one, two = (asked(served, worker, key, path) for key in (ONE, TWO))
    assert one.block_hashes == two.block_hashes
    assert asked(served, worker, TWO, path, cache_salt="s").block_hashes != one.block_hashes


def test_without_keys_nothing_is_salted(serve: Serve, decode: Make) -> None:
    worker = decode()
    served = serve(worker, served_model_name=("m",))
    request = asked(served, worker, "any", "/v1/completions")
    assert (request.cache_salt, request.tenant) == (None, "")


def test_a_stored_response_is_its_tenants_alone(serve: Serve, decode: Make) -> None:
    """Another one's id is 404, in each method and as what goes on from it; it stays."""
    served = served_with_keys(serve, decode())
    made = ask(served, ONE, "POST", "/v1/responses", BODIES["/v1/responses"]).json()
    path = f"/v1/responses/{made['id']}"
    for key in (TWO, ADMIN):
        for method, url in (
            ("GET", path),
            ("DELETE", path),
            ("GET", f"{path}/input_items"),
            ("POST", f"{path}/cancel"),
        ):
            assert ask(served, key, method, url).status_code == 404
        body = {"input": "And?", "previous_response_id": made["id"], "max_output_tokens": 1}
        assert ask(served, key, "POST", "/v1/responses", body).status_code == 404
    assert ask(served, ONE, "GET", path).json()["id"] == made["id"]


def test_a_tenants_stored_responses_survive_those_of_another(serve: Serve, decode: Make) -> None:
    served = served_with_keys(serve, decode(), max_stored_responses=4)
    body = BODIES["/v1/responses"]
    kept = [ask(served, ONE, "POST", "/v1/responses", body).json()["id"] for _ in range(2)]
    for _ in range(6):
        assert ask(served, TWO, "POST", "/v1/responses", body).status_code == 200
    for each in kept:
        assert ask(served, ONE, "GET", f"/v1/responses/{each}").status_code == 200


def test_records_of_calls_are_their_tenants_and_the_administrators(
    serve: Serve, decode: Make
) -> None:
    served = served_with_keys(serve, decode())
    for key, name in ((ONE, "of-one"), (TWO, "of-two")):
        body = {**BODIES["/v1/completions"], "request_id": name}
        assert ask(served, key, "POST", "/v1/completions", body).status_code == 200
    seen = {
        key: {
            each["request_id"]
            for each in ask(served, key, "GET", "/debug/requests").json()["requests"]
        }
        for key in (ONE, TWO, ADMIN)
    }
    assert seen == {ONE: {"of-one"}, TWO: {"of-two"}, ADMIN: {"of-one", "of-two"}}
    assert ask(served, ONE, "GET", "/debug/requests").json()["kept"] == 1
    found = {
        (key, name): ask(served, key, "GET", f"/debug/requests/{name}").status_code
        for key in (ONE, TWO, ADMIN)
        for name in ("of-one", "cmpl-of-two")
    }
    assert [each for each, code in found.items() if code == 404] == [
        (ONE, "cmpl-of-two"),
        (TWO, "of-one"),
    ]
    placed = [
        len(ask(served, key, "GET", "/debug/placements").json()["placements"])
        for key in (ONE, TWO, ADMIN)
    ]
    assert placed == [1, 1, 2]


async def test_embeddings_that_a_tenant_holds_leave_room_for_another() -> None:
    """Two thirds of all are the most that one holds next to others."""
    intake = EmbedsIntake(lambda: True, max_held_bytes=900)
    current_tenant.set(Tenant("hog"))
    with intake.holding(["x" * 800]):
        with pytest.raises(RequestRefused, match="or over the part of this client"):
            intake.holding(["x" * 40]).__enter__()
        current_tenant.set(Tenant("victim"))
        with intake.holding(["x" * 200]):
            assert intake.held_bytes == 750
    assert intake.held_bytes == 0


def test_records_of_a_tenant_survive_those_of_another(serve: Serve, decode: Make) -> None:
    served = served_with_keys(serve, decode(), timeline_requests=4)
    body = BODIES["/v1/completions"]
    named = {**body, "request_id": "of-one"}
    assert ask(served, ONE, "POST", "/v1/completions", named).status_code == 200
    for _ in range(6):
        assert ask(served, TWO, "POST", "/v1/completions", body).status_code == 200
    assert ask(served, ONE, "GET", "/debug/requests/of-one").status_code == 200
