"""Embeddings, pooling, classes, scores and ranks over HTTP, by workers that behave."""

from __future__ import annotations

import base64
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.openai.parameters_page import listed

from tandem.protocol.card import WorkerRole
from tandem.protocol.pooling import ModelPooling, PoolingTask
from tandem.router.api.openai.bodies import pooling_schemas
from tandem.router.api.openai.bodies.bounds import Body

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
PAGE = Path(__file__).parents[3] / "docs" / "pooling.md"
BODIES: dict[str, tuple[type[Body], str, dict[str, Any]]] = {
    "embeddings": (pooling_schemas.EmbeddingBody, "/v1/embeddings", {"input": "Hi there"}),
    "pooling": (pooling_schemas.PoolingBody, "/pooling", {"input": "Hi there"}),
    "classify": (pooling_schemas.ClassifyBody, "/classify", {"input": "Hi there"}),
    "score": (pooling_schemas.ScoreBody, "/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    "rerank": (pooling_schemas.RerankBody, "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
}
SENTIMENT = ModelPooling(labels=("bad", "good", "odd"), generates=False)
CROSS = ModelPooling(labels=("relevant",), generates=False)


@pytest.fixture(scope="module")
def embedder(small_model: Path) -> Iterator[Served]:
    """A prefill and a decode worker of a model without labels."""
    yield from _served(small_model, ModelPooling(), WorkerRole.PREFILL, WorkerRole.DECODE)


@pytest.fixture(scope="module")
def classifier(small_model: Path) -> Iterator[Served]:
    """A decode worker of a model with three labels."""
    yield from _served(small_model, SENTIMENT, WorkerRole.DECODE)


@pytest.fixture(scope="module")
def cross(small_model: Path) -> Iterator[Served]:
    """A decode worker of a model with one label."""
    yield from _served(small_model, CROSS, WorkerRole.DECODE)


def _served(model: Path, pooling: ModelPooling, *roles: WorkerRole) -> Iterator[Served]:
    workers = [FakeWorker(role, pooling=pooling) for role in roles]
    served = Served(str(model), workers, allow_request_priority=True)
    yield served
    served.stop()
    for worker in workers:
        worker.stop()


def ask(served: Served, path: str, **body: Any) -> Any:
    answer = served.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vector_of(served: Served, text: str) -> list[float]:
    angle = float(sum(served.tokenizer.encode(text)))
    return [math.cos(angle) * 0.6, math.sin(angle) * 0.6, 0.8, 0.0]


def test_vectors_come_in_order_with_the_usage(embedder: Served) -> None:
    """By the openai package, which asks for base64, and as numbers; a prefill worker answers."""
    texts = ["one", "two and more", "three"]
    with embedder.client() as client:
        answer = client.embeddings.create(model="fake", input=texts)
    for text, item in zip(texts, answer.data, strict=True):
        assert item.embedding == pytest.approx(vector_of(embedder, text), abs=1e-6)
    assert answer.usage.prompt_tokens == sum(map(len, texts)) == answer.usage.total_tokens
    whole = ask(embedder, "/v1/embeddings", input=texts, encoding_format="float", user="me")
    assert [item["embedding"] for item in whole["data"]] == [
        pytest.approx(vector_of(embedder, text), abs=1e-6) for text in texts
    ]
    assert embedder.workers[1].submitted == []
    assert all(request.kv is None for request in embedder.workers[0].submitted)


def test_an_answer_ends_its_attempt_and_nothing_is_cancelled(serve: Serve, decode: Make) -> None:
    """The worker has let go of it already, and the record says when it was over."""
    worker = decode()
    served = serve(worker)
    for text in ("one", "two"):
        answer = served.post("/v1/embeddings", json={"input": text})
        assert answer.status_code == 200
        told = served.get(f"/debug/requests/{answer.headers['x-request-id']}")
        assert [each["end_ms"] is not None for each in told["attempts"]] == [True]
    assert worker.cancelled == []  # of the first: what was said to it before the second was heard


@pytest.mark.parametrize("value", ["Hi", [5, 6, 7], ["Hi", "you"], [[5, 6], [7]]])
def test_every_form_of_input(embedder: Served, value: Any) -> None:
    """A text, ids, and lists of either."""
    several = isinstance(value, list) and not isinstance(value[0], int)
    given = value if several else [value]
    answer = ask(embedder, "/v1/embeddings", input=value)
    assert [item["index"] for item in answer["data"]] == list(range(len(given)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, given))


def test_pooling_gives_what_its_task_says(embedder: Served) -> None:
    """One vector, or one a token, as numbers and as bytes."""
    (one,) = ask(embedder, "/pooling", input="abc")["data"]
    assert one["data"] == pytest.approx(vector_of(embedder, "abc"), abs=1e-6)
    (each,) = ask(embedder, "/pooling", input="abc", task="token_embed", dimensions=2)["data"]
    assert [len(vector) for vector in each["data"]] == [2, 2, 2]
    (coded,) = ask(embedder, "/pooling", input="abc", task="token_embed", encoding_format="base64")[
        "data"
    ]
    assert len(base64.b64decode(coded["data"])) == 3 * 4 * 4
    sent = embedder.workers[0].submitted[-1].pooling
    assert sent is not None
    assert sent.task is PoolingTask.TOKEN_EMBED


def test_classes_have_names_and_the_best_is_told(classifier: Served) -> None:
    (item,) = ask(classifier, "/classify", input="abc")["data"]
    labels, probs = SENTIMENT.labels, item["probs"]
    assert item["num_classes"] == len(probs) == 3
    assert item["label"] == labels[probs.index(max(probs))]
    (pooled,) = ask(classifier, "/pooling", input="abc", task="classify")["data"]
    assert pooled["data"] == probs


def test_scores_are_cosines_of_vectors_that_are_made_once(embedder: Served) -> None:
    """One text with several, or pair by pair; the same text twice is one request."""
    before = len(embedder.workers[0].submitted)
    answer = ask(embedder, "/v1/score", text_1="a", text_2=["b", "a", "b"])
    scores = [item["score"] for item in answer["data"]]
    vectors = [vector_of(embedder, text) for text in "ab"]
    product = sum(x * y for x, y in zip(*vectors, strict=True))
    assert scores == pytest.approx([product, 1.0, product], abs=1e-6)
    assert len(embedder.workers[0].submitted) - before == 2
    pairs = ask(embedder, "/score", text_1=["a", "b"], text_2=["b", "b"])
    assert [item["score"] for item in pairs["data"]] == pytest.approx([product, 1.0], abs=1e-6)


def test_a_model_of_one_label_reads_both_texts(cross: Served) -> None:
    """As one prompt; ranks are by its numbers, the best first, ties in their order."""
    answer = ask(cross, "/v1/score", text_1="ab", text_2=["cd", "e"])
    sent = [request.prompt_token_ids for request in cross.workers[0].submitted[-2:]]
    assert sorted(sent) == sorted([cross.tokenizer.encode("abcd"), cross.tokenizer.encode("abe")])
    scores = [item["score"] for item in answer["data"]]
    assert answer["usage"]["prompt_tokens"] == 7
    ranked = ask(cross, "/v1/rerank", query="ab", documents=["cd", "e"])["results"]
    order = sorted(range(2), key=lambda index: -scores[index])
    assert [item["index"] for item in ranked] == order
    assert [item["relevance_score"] for item in ranked] == [scores[index] for index in order]
    assert [item["document"]["text"] for item in ranked] == [["cd", "e"][i] for i in order]


def test_ranks_are_cut_and_texts_left_out(embedder: Served) -> None:
    """top_n and return_documents, on each of the paths."""
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        documents = ["b", {"text": "a"}, "c"]
        answer = ask(
            embedder, path, query="a", documents=documents, top_n=1, return_documents=False
        )
        (best,) = answer["results"]
        assert best == {"index": 1, "relevance_score": pytest.approx(1.0, abs=1e-6)}


WRONG: list[tuple[str, str, Mapping[str, Any], str | None]] = [
    ("embedder", "/v1/embeddings", {}, "input"),
    ("embedder", "/v1/embeddings", {"input": []}, "input"),
    ("embedder", "/v1/embeddings", {"input": ""}, "input"),
    ("embedder", "/v1/embeddings", {"input": ["a", ""]}, "input[1]"),
    ("embedder", "/v1/embeddings", {"input": 5}, "input"),
    ("embedder", "/v1/embeddings", {"input": [{"prompt": "a"}]}, "input"),
    ("embedder", "/v1/embeddings", {"input": [-1]}, "input"),
    ("embedder", "/v1/embeddings", {"input": [[5], [10**9]]}, "input[1]"),
    ("embedder", "/v1/embeddings", {"input": ["a"] * 2049}, "input"),
    ("embedder", "/v1/embeddings", {"input": "a" * 2049}, "input"),
    ("embedder", "/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
    ("embedder", "/v1/embeddings", {"input": "a", "encoding_format": "x"}, "encoding_format"),
    ("embedder", "/v1/embeddings", {"input": "a", "messages": []}, "messages"),
    ("embedder", "/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
    ("embedder", "/v1/embeddings", {"input": "a", "dimension": 3}, "dimension"),
    ("embedder", "/v1/embeddings", {"input": "a", "truncation_side": "left"}, "truncation_side"),
    ("embedder", "/v1/embeddings", {"input": "a", "user": "x" * 513}, "user"),
    ("embedder", "/pooling", {"input": "a", "task": "guess"}, "task"),
    ("embedder", "/pooling", {"input": "a", "activation": True}, "activation"),
    ("embedder", "/classify", {"input": "a"}, "model"),
    ("embedder", "/v1/score", {"text_1": "a", "text_2": []}, "text_2"),
    ("embedder", "/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_1"),
    ("embedder", "/v1/score", {"text_1": "a", "text_2": ["a", 5]}, "text_2[1]"),
    ("embedder", "/v1/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ("embedder", "/v1/score", {"text_1": "a", "text_2": ["b"] * 2049}, "text_2"),
    ("embedder", "/v1/score", {"text_1": "a", "text_2": "b", "activation": False}, "activation"),
    ("classifier", "/v1/score", {"text_1": "a", "text_2": "b"}, "model"),
    ("embedder", "/v1/rerank", {"query": "a", "documents": []}, "documents"),
    ("embedder", "/v1/rerank", {"query": "a", "documents": [{"b": "c"}]}, "documents[0]"),
    ("embedder", "/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
    ("embedder", "/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ("cross", "/v1/rerank", {"query": "a" * 2000, "documents": ["b" * 2000]}, "documents[0]"),
    ("classifier", "/v1/completions", {"prompt": "a"}, "model"),
]


@pytest.mark.parametrize(("name", "path", "body", "param"), WRONG)
def test_what_is_wrong_is_named(
    request: pytest.FixtureRequest,
    name: str,
    path: str,
    body: Mapping[str, Any],
    param: str | None,
) -> None:
    """A 400 with the field, before any worker is asked."""
    served: Served = request.getfixturevalue(name)
    before = sum(len(worker.submitted) for worker in served.workers)
    answer = served.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert sum(len(worker.submitted) for worker in served.workers) == before


def test_an_unknown_model_is_404(embedder: Served) -> None:
    for _, path, body in BODIES.values():
        assert embedder.post(path, json={**body, "model": "other"}).status_code == 404


def test_workers_of_a_build_before_are_not_asked(serve: Serve, decode: Make) -> None:
    """They would answer with something else than was asked for."""
    old = decode(pooling=None)
    answer = serve(old).post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert old.submitted == []


def test_a_call_that_comes_to_too_much_is_refused(serve: Serve, decode: Make) -> None:
    """The values of all inputs together are bounded."""

    class Large(FakeWorker):
        def values_of(self, request: Any) -> list[float]:
            return [0.5] * (3 << 20)

    large = Large(WorkerRole.DECODE)
    try:
        served = serve(large)
        assert served.post("/pooling", json={"input": "a"}).status_code == 200
        answer = served.post("/pooling", json={"input": ["a", "b"]})
        assert answer.status_code == 400
        assert "at most 4194304 in one answer" in answer.json()["error"]["message"]
    finally:
        large.stop()


SHARED: dict[str, tuple[Mapping[str, Any], Callable[[Any, Any], bool]]] = {
    "model": ({"model": "fake"}, lambda sent, answer: answer["model"] == "fake"),
    "truncate_prompt_tokens": (
        {"truncate_prompt_tokens": 1},
        lambda sent, answer: len(sent.prompt_token_ids) == 1,
    ),
    "truncation_side": (
        {"truncate_prompt_tokens": 1, "truncation_side": "right"},
        lambda sent, answer: len(sent.prompt_token_ids) == 1,
    ),
    "cache_salt": ({"cache_salt": "s"}, lambda sent, answer: sent.cache_salt == "s"),
    "timeout": ({"timeout": 5}, lambda sent, answer: 0 < sent.budget_ms <= 5000),
    "priority": ({"priority": 2}, lambda sent, answer: sent.priority == 2),
    "request_id": ({"request_id": "m"}, lambda sent, answer: answer["id"].endswith("-m")),
    "user": ({"user": "me"}, lambda sent, answer: True),
    "add_special_tokens": ({"add_special_tokens": False}, lambda sent, answer: True),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_parameters_have_their_effect(embedder: Served, name: str) -> None:
    """On each of the paths that a model without labels has."""
    extra, see = SHARED[name]
    for kind, (_, path, body) in BODIES.items():
        if kind != "classify":
            answer = ask(embedder, path, **body, **extra)
            assert see(embedder.workers[0].submitted[-1], answer), path


def test_own_parameters_reach_the_worker(embedder: Served, cross: Served) -> None:
    ask(embedder, "/v1/embeddings", input="a", normalize=False, dimensions=3)
    sent = embedder.workers[0].submitted[-1].pooling
    assert sent is not None
    assert msgspec.to_builtins(sent) == {"normalize": False, "dimensions": 3}
    for kind in ("classify", "score", "rerank"):
        _, path, body = BODIES[kind]
        ask(cross, path, **body, activation=False)
        sent = cross.workers[0].submitted[-1].pooling
        assert sent is not None
        assert sent.activation is False


def test_the_page_lists_every_parameter() -> None:
    """The table of docs/pooling.md, the refused names and the schemas agree."""
    section = PAGE.read_text().split("## Parameters\n")[1]
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", section, re.MULTILINE)
    told = {
        kind: {name for name, of in rows if of == "all" or kind in of.split(", ")}
        for kind in BODIES
    }
    assert told == {kind: set(body.model_fields) for kind, (body, _, _) in BODIES.items()}
    for kind, (body, _, _) in BODIES.items():
        assert listed("Refused", kind) | listed("Refused", "vectors and scores") == set(
            body.REFUSED
        )


def test_bytes_are_float32(embedder: Served) -> None:
    (item,) = ask(embedder, "/v1/embeddings", input="a", encoding_format="base64")["data"]
    values = array("f", base64.b64decode(item["embedding"]))
    assert values.tolist() == pytest.approx(vector_of(embedder, "a"), abs=1e-6)
