"""Inputs that are too long for vectors and scores: which end is cut, and how errors name them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.protocol.card import WorkerRole
from tandem.protocol.pooling import ModelPooling

pytestmark = pytest.mark.full

DIGITS = "0123456789"


@pytest.fixture(scope="module", params=["cross", "bi"])
def kind(request: pytest.FixtureRequest) -> str:
    """A model with a head for pairs, or one of vectors."""
    return str(request.param)


@pytest.fixture(scope="module")
def served(small_model: Path, kind: str) -> Iterator[Served]:
    """A decode worker of such a model; its tokenizer gives a token for each letter."""
    pooling = ModelPooling(labels=("l",), generates=False) if kind == "cross" else ModelPooling()
    worker = FakeWorker(WorkerRole.DECODE, pooling=pooling)
    served = Served(str(small_model), [worker])
    yield served
    served.stop()
    worker.stop()


def sent(served: Served, path: str, **body: Any) -> list[str]:
    """The texts that a worker was asked for, at a call that is answered."""
    before = len(served.workers[0].submitted)
    answer = served.post(path, json=body)
    assert answer.status_code == 200, answer.text
    requests = served.workers[0].submitted[before:]
    return sorted(served.tokenizer.decode(each.prompt_token_ids) for each in requests)


@pytest.mark.parametrize(
    ("side", "pairs", "alone"),
    [
        ({}, ["abc01"], ["01234", "abc"]),
        ({"truncation_side": "right"}, ["abc01"], ["01234", "abc"]),
        ({"truncation_side": "left"}, ["abc89"], ["56789", "abc"]),
    ],
)
def test_the_document_is_cut_and_never_the_query(
    served: Served, kind: str, side: dict[str, str], pairs: list[str], alone: list[str]
) -> None:
    """At its end unless its beginning is asked for, by rerank as by score."""
    want = pairs if kind == "cross" else alone
    cut = {"truncate_prompt_tokens": 5, **side}
    assert sent(served, "/v1/rerank", query="abc", documents=[DIGITS], **cut) == want
    assert sent(served, "/v1/score", text_1="abc", text_2=[DIGITS], **cut) == want


def test_two_queries_have_two_scores(served: Served, kind: str) -> None:
    cut = {"documents": ["x" * 500], "truncate_prompt_tokens": 40}
    first = sent(served, "/v1/rerank", query="query one", **cut)
    assert first != sent(served, "/v1/rerank", query="other query", **cut)


def test_what_fits_is_kept_by_minus_one(served: Served, kind: str) -> None:
    """The whole context; without it the document is an error of its own place."""
    long = DIGITS * 400
    (text, *_) = sent(
        served, "/v1/rerank", query="abc", documents=[long], truncate_prompt_tokens=-1
    )
    assert len(text) == 2048
    documents = ["short"] * 7 + [long] + ["short"] * 92
    answer = served.post("/v1/rerank", json={"query": "abc", "documents": documents})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "documents[7]"


def test_a_query_that_leaves_no_room_is_named(served: Served, kind: str) -> None:
    """It is not cut for a document's sake."""
    body = {"query": "abcdefgh", "documents": ["x"], "truncate_prompt_tokens": 5}
    answer = served.post("/v1/rerank", json=body)
    if kind == "cross":
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "query"
    else:
        assert answer.status_code == 200


def test_vectors_are_of_the_beginning(served: Served, kind: str) -> None:
    """As the models were trained to read texts that are cut; a prompt to go on from keeps its
    end."""
    if kind == "cross":
        pytest.skip("it gives no vectors")
    for path in ("/v1/embeddings", "/pooling"):
        assert sent(served, path, input=DIGITS, truncate_prompt_tokens=4) == ["0123"]
    body = {"model": "fake", "prompt": DIGITS, "truncate_prompt_tokens": 4, "max_tokens": 1}
    assert sent(served, "/v1/completions", **body) == ["6789"]


@pytest.mark.parametrize(("count", "status"), [(2048, 200), (2049, 400)])
def test_a_call_takes_as_many_inputs_as_openais(
    served: Served, kind: str, count: int, status: int
) -> None:
    """By default; they go to workers a part at a time."""
    if kind == "cross":
        answer = served.post("/v1/rerank", json={"query": "a", "documents": ["b"] * count})
    else:
        answer = served.post("/v1/embeddings", json={"input": ["b"] * count})
    assert answer.status_code == status
    if status == 400:
        assert "at most 2048 entries; it has 2049" in answer.json()["error"]["message"]
    else:
        assert len(answer.json()["results" if kind == "cross" else "data"]) == count
