"""Encoders behind a real router: a prefill worker alone is the whole fleet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
from stack import Stack
from tests import clear_text
from tests.engine_run.encoder_models import maxsim_of, scores_of, states_of
from tests.llm.encoder_folders import TEXTS, colbert_folder, encoder_folder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

FLAGS = ["--device", "cpu"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A sentence-transformers' BERT that takes the mean, of length one."""
    folder, _, _ = encoder_folder("bert", pooling="mean_tokens", normalize=True)
    log: Path = tmp_path_factory.mktemp("embedder") / "stack.log"
    with Stack.running(str(folder), log, decode=0, worker_flags=FLAGS) as stack:
        yield stack


def posted(stack: Stack, path: str, **body: object) -> httpx.Response:
    return clear_text.post(stack.url + path, json=body, timeout=60)


def test_vectors_and_ranks_by_a_prefill_worker_alone(embedder: Stack) -> None:
    """/ready answers 200 without any decode worker; vectors are transformers' means."""
    assert clear_text.get(f"{embedder.url}/ready").status_code == 200
    _, model, tokenizer = encoder_folder("bert", pooling="mean_tokens", normalize=True)
    with openai.OpenAI(base_url=f"{embedder.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="smol", input=TEXTS)
    wanted = [states_of(model, tokenizer(text)["input_ids"]).mean(0) for text in TEXTS]
    units = [each / each.norm() for each in wanted]
    for item, want in zip(answer.data, wanted, strict=True):
        assert torch.cosine_similarity(torch.tensor(item.embedding), want, 0) > 1 - 1e-3
    ranked = posted(embedder, "/v1/rerank", query=TEXTS[0], documents=TEXTS).json()["results"]
    found = {item["index"]: item["relevance_score"] for item in ranked}
    assert [found[index] for index in range(len(TEXTS))] == pytest.approx(
        [float(units[0] @ each) for each in units], abs=2e-3
    )
    assert ranked[0]["index"] == 0


def test_what_an_encoder_does_not_do_is_a_bad_request(embedder: Stack) -> None:
    """Tokens, more of them than there are positions, classes without a head; then it goes on."""
    for path, body, param in (
        ("/v1/completions", {"prompt": "a"}, "model"),
        ("/v1/embeddings", {"input": [5] * 129}, "input"),
        ("/classify", {"input": "a"}, "model"),
    ):
        answer = posted(embedder, path, **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    whole = posted(embedder, "/v1/embeddings", input="a " * 200, truncate_prompt_tokens=-1)
    assert whole.json()["usage"]["prompt_tokens"] == 128
    _, model, tokenizer = encoder_folder("bert", pooling="mean_tokens", normalize=True)
    first, *_, last = ids = tokenizer("the cat sat on the mat in paris")["input_ids"]
    for side, kept in (("left", ids[-5:-1]), ("right", ids[1:5])):
        cut = posted(
            embedder,
            "/v1/embeddings",
            input="the cat sat on the mat in paris",
            truncate_prompt_tokens=6,
            truncation_side=side,
        )
        want = states_of(model, [first, *kept, last]).mean(0)
        got = torch.tensor(cut.json()["data"][0]["embedding"])
        assert torch.cosine_similarity(got, want, 0) > 1 - 1e-3
    assert posted(embedder, "/pooling", input=[5] * 128, task="token_embed").status_code == 200


@pytest.mark.parametrize("decode", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_a_cross_encoder_scores_pairs(tmp_path: Path, decode: int) -> None:
    """By a prefill worker, or by a decode worker alone; types of tokens go all the way."""
    folder, model, tokenizer = encoder_folder("bert-pairs")
    log = tmp_path / "stack.log"
    with Stack.running(
        str(folder), log, prefill=1 - decode, decode=decode, worker_flags=FLAGS
    ) as stack:
        answer = posted(stack, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[:2]).json()
        classes = posted(stack, "/classify", input=TEXTS[1]).json()["data"]
    for item, text in zip(answer["data"], TEXTS, strict=False):
        joined = tokenizer(TEXTS[0], text, return_token_type_ids=True)
        at = joined["token_type_ids"].index(1)
        want = scores_of(model, joined["input_ids"], at).sigmoid()
        assert item["score"] == pytest.approx(float(want), abs=1e-3)
    alone = scores_of(model, tokenizer(TEXTS[1])["input_ids"]).sigmoid()
    assert classes[0]["probs"] == pytest.approx([float(alone)], abs=1e-3)


@pytest.mark.nightly
def test_late_interaction_meets_at_the_worker_that_keeps_the_query(tmp_path: Path) -> None:
    """Over two prefill workers: ranks and scores are a plain MaxSim's, and both have work."""
    folder, vectors_of = colbert_folder()
    log = tmp_path / "stack.log"
    with Stack.running(str(folder), log, prefill=2, decode=0, worker_flags=FLAGS) as stack:
        for query in TEXTS:
            want = [maxsim_of(vectors_of(query), vectors_of(text)) for text in TEXTS]
            ranked = posted(stack, "/v1/rerank", query=query, documents=TEXTS).json()["results"]
            got = {item["index"]: item["relevance_score"] for item in ranked}
            assert [got[index] for index in range(len(TEXTS))] == pytest.approx(want, rel=1e-3)
        pairs = posted(stack, "/score", text_1=TEXTS, text_2=TEXTS[::-1]).json()
        want = [
            maxsim_of(vectors_of(a), vectors_of(b)) for a, b in zip(TEXTS, TEXTS[::-1], strict=True)
        ]
        assert [item["score"] for item in pairs["data"]] == pytest.approx(want, rel=1e-3)
        assert pairs["usage"]["prompt_tokens"] == 2 * sum(len(vectors_of(text)) for text in TEXTS)
        for number in range(20):
            if all(stack.total(name, "vllm:prompt_tokens_total") for name in stack.workers):
                break
            posted(stack, "/score", text_1=f"{number}", text_2=TEXTS[0])
        assert all(stack.total(name, "vllm:prompt_tokens_total") for name in stack.workers)
        refused = posted(stack, "/v1/embeddings", input="a")
        assert refused.status_code == 400
        assert "a vector for each token" in refused.json()["error"]["message"]
