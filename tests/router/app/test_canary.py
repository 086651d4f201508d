"""The operator's canary: its own way through the fleet, out of users' sight; and key folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.operator.probes.fleet import read_fleet, read_links
from tandem.protocol.names import (
    HEADER_CANARY,
    HEADER_DECODE_REVISION,
    HEADER_PREFILL_REVISION,
    HEADER_SHAPE,
)
from tandem.router.workers.connection import WorkerNote

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
BODY: Any = {"model": "fake", "prompt": "Tell me of the capital of France", "max_tokens": 4}


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The canary's token, as it is mounted."""
    path = tmp_path / "token"
    path.write_text("sesame\n")
    return path


def note(served: Served, worker: FakeWorker, **fields: Any) -> None:
    pool = served.app.state.router.pool
    loop = pool._ticker.get_loop()
    loop.call_soon_threadsafe(pool.note, worker.endpoint, WorkerNote(**fields))


def counted(served: Served) -> list[str]:
    """Counters and histograms of requests that are not zero."""
    lines = served.metrics().splitlines()
    asked = [line for line in lines if "_total" in line or "_count" in line]
    return [
        line
        for line in asked
        if line[0] != "#" and not line.endswith(" 0.0") and "/debug" not in line
    ]


def ask(served: Served, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return served.post("/v1/completions", json=BODY, headers={HEADER_CANARY: "sesame", **named})


@pytest.mark.parametrize(("shape", "submitted"), [("disaggregated", 1), ("aggregated", 0)])
def test_it_chooses_the_shape(
    serve: Serve, prefill: Make, decode: Make, token: Path, shape: str, submitted: int
) -> None:
    """Through both workers or one, as asked; the answer says which."""
    p, d = prefill(), decode()
    served = serve(p, d, canary_token_file=str(token))
    answer = ask(served, **{HEADER_SHAPE: shape})

    assert answer.status_code == 200
    assert answer.headers[HEADER_SHAPE] == shape
    assert len(p.submitted) == submitted
    assert len(d.submitted) == 1
    # Series are there from the start, at 0.
    way = "handoff" if shape == "disaggregated" else "whole"
    counted = f'tandem:router_attempts_total{{kind="first",shape="{way}"}} '
    assert counted + "0.0" in clear_text.get(served.url + "/metrics").text
    assert counted + "1.0" in clear_text.get(served.url + "/debug/canary").text


def test_a_vector_comes_of_the_revision_that_is_named(
    serve: Serve, prefill: Make, token: Path
) -> None:
    """By a prefill worker that serves no user yet, in a fleet of such workers alone."""
    old, new = prefill(), prefill()
    served = serve(old, new, canary_token_file=str(token), ready_decode=0)
    note(served, old, role="prefill", revision="old", admitted=True)
    note(served, new, role="prefill", revision="new")
    for revision, worker in (("new", new), ("old", old)):
        before = len(worker.submitted)
        headers = {HEADER_CANARY: "sesame", HEADER_PREFILL_REVISION: revision}
        body = {"model": "fake", "input": ["a", "b"]}
        answer = served.post("/v1/embeddings", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        assert len(worker.submitted) == before + 2


def test_a_shape_that_cannot_be_had_is_no_other(serve: Serve, decode: Make, token: Path) -> None:
    """Without a prefill worker there is no hand-off, and no answer that looks like one."""
    served = serve(decode(), canary_token_file=str(token))
    assert ask(served, **{HEADER_SHAPE: "disaggregated"}).status_code == 503
    wrong = ask(served, **{HEADER_SHAPE: "sideways"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == HEADER_SHAPE


def test_it_reaches_a_revision_that_is_not_admitted(
    serve: Serve, decode: Make, token: Path
) -> None:
    """Users stay on the old one, and the answer names who served."""
    old, new = decode(), decode()
    served = serve(old, new, canary_token_file=str(token))
    note(served, old, revision="r1", admitted=True)
    note(served, new, revision="r2")
    answer = ask(served, **{HEADER_DECODE_REVISION: "r2"})
    assert answer.status_code == 200
    assert answer.headers[HEADER_DECODE_REVISION] == "r2"
    assert answer.headers[HEADER_PREFILL_REVISION] == ""
    assert (len(old.submitted), len(new.submitted)) == (0, 1)

    plain = served.post("/v1/completions", json=BODY)
    assert HEADER_DECODE_REVISION not in plain.headers
    assert (len(old.submitted), len(new.submitted)) == (1, 1)


def test_it_is_not_counted(serve: Serve, decode: Make, token: Path) -> None:
    """Users' metrics do not move; a user's request moves them."""
    served = serve(decode(), canary_token_file=str(token))
    assert ask(served).status_code == 200
    assert counted(served) == []
    served.post("/v1/completions", json=BODY)
    assert len(counted(served)) > 5


@pytest.mark.parametrize("known", ["other", None])
def test_a_wrong_token_is_refused(
    serve: Serve, decode: Make, token: Path, known: str | None
) -> None:
    token.write_text(known or "")
    served = serve(decode(), canary_token_file=str(token) if known else None)
    assert ask(served).status_code == 401


def test_the_operator_reads_links_and_keys_of_a_router_with_api_keys(
    serve: Serve, prefill: Make, decode: Make, token: Path
) -> None:
    """The canary's token opens /debug/fleet, which has no other door for the operator."""
    served = serve(
        prefill(), decode(), wait=False, api_key=("secret",), canary_token_file=str(token)
    )
    wait_for(lambda: served.server.started)
    assert clear_text.get(served.url + "/debug/fleet").status_code == 401

    def healthy() -> int | None:
        links = read_links(served.url, 1, "sesame")
        return None if links is None else links.healthy

    wait_for(lambda: healthy() == 1)
    assert read_links(served.url, 1, "wrong") is None
    assert read_fleet(served.url, "sesame", 5.0)["keys"] == []


def test_keys_of_a_folder(serve: Serve, decode: Make, token: Path, tmp_path: Path) -> None:
    """Each file is a key; what is added later counts; the canary needs none."""
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "first").write_text("one\n")
    served = serve(decode(), wait=False, api_keys_dir=str(keys), canary_token_file=str(token))
    wait_for(lambda: served.server.started)
    wait_for(lambda: clear_text.get(served.url + "/ready").status_code == 200)

    def status(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return served.post("/v1/completions", json=BODY, headers=headers).status_code

    assert status("one") == 200
    assert status("two") == 401
    (keys / "second").write_text("two\n")
    os.utime(keys, (1, 1))
    assert status("two") == 200
    assert ask(served).status_code == 200
