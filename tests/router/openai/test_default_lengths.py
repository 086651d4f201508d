"""How long an answer is whose length nobody asked for, by the model's generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.rpc_client import RpcClient

from tandem.protocol.card import WorkerRole

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def port() -> int:
    (found,) = own_ports(1)
    return found


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, small_model: Path, port: int
) -> Iterator[Served]:
    """A context of 2,048 tokens, and a model that says 1,000 of an answer by default."""
    folder = tmp_path_factory.mktemp("default-lengths") / "model"
    shutil.copytree(small_model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 1_000}))
    worker = FakeWorker(WorkerRole.DECODE)
    app = Served(str(folder), [worker], grpc_port=port)
    yield app
    app.stop()
    worker.stop()


def lengths(served: Served) -> tuple[int, int | None]:
    """Of the last prompt that a worker got, and of its answer at most."""
    request = served.workers[0].submitted[-1]
    return len(request.prompt_token_ids), request.params.max_tokens


def said(chars: int) -> list[dict[str, str]]:
    """A chat that is a little longer in tokens."""
    return [{"role": "user", "content": "a" * chars}]


@pytest.mark.parametrize(
    ("chars", "fields", "most"),
    [
        (10, {}, 1_000),
        (1_500, {}, 541),
        (10, {"min_tokens": 1_200}, 1_200),
        (10, {"max_tokens": 1_500}, 1_500),
    ],
)
@pytest.mark.parametrize("by_grpc", [False, True])
def test_a_default_is_capped_by_the_context(
    served: Served, port: int, by_grpc: bool, chars: int, fields: dict[str, Any], most: int
) -> None:
    if by_grpc:
        client = RpcClient(port)
        client.call("Generate", chat={"messages": said(chars)}, sampling=fields)
        client.close()
    else:
        answer = served.post("/v1/chat/completions", json={"messages": said(chars), **fields})
        assert answer.status_code == 200, answer.text

    num_prompt, bound = lengths(served)
    assert bound == most
    assert num_prompt + most <= 2_048


def test_a_truncated_chat_keeps_what_fits(served: Served) -> None:
    """All but one token; one that is asked for more has less."""
    body = {"messages": said(3_000), "truncate_prompt_tokens": -1}
    assert served.post("/v1/chat/completions", json=body).status_code == 200
    assert lengths(served) == (2_047, 1)
    answer = served.post("/v1/chat/completions", json={**body, "max_tokens": 48})
    assert answer.status_code == 200
    assert lengths(served) == (2_000, 48)


def test_what_a_client_asks_for_is_refused_where_it_does_not_fit(served: Served) -> None:
    body = {"messages": said(1_500), "max_tokens": 1_000}
    answer = served.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_tokens"
