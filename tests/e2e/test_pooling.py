"""Vectors, classes and scores by real routers and workers, apart and in one, and over a death."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import torch
from client import held_after
from stack import Stack
from test_tokens import Growth
from tests import clear_text
from tests.llm.test_scores import classifier, scores_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TEXTS = ["The capital of France is Paris.", "A cat sat on the mat.", "Paris " * 80, "Hi"]
FREE_SECONDS = 10.0
"""What is held longer is held for good."""
EXACT = ["--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def apart(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One prefill and one decode worker in float32. The last test kills the prefill worker."""
    log = tmp_path_factory.mktemp("apart") / "stack.log"
    with Stack.running(str(small), log, worker_flags=EXACT) as stack:
        yield stack


@pytest.fixture(scope="module")
def wanted(small: Path) -> list[torch.Tensor]:
    """transformers' last hidden state of each text's last token."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(small)
    model = transformers.AutoModel.from_pretrained(small, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [
            model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
            for text in TEXTS
        ]


def embedded(stack: Stack, texts: list[str]) -> list[list[float]]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.embeddings.create(model="smol", input=texts)
    return [item.embedding for item in answer.data]


def posted(stack: Stack, path: str, **body: object) -> httpx.Response:
    return clear_text.post(stack.url + path, json=body, timeout=60)


def check(vectors: list[list[float]], wanted: list[torch.Tensor]) -> None:
    for got, want in zip(vectors, wanted, strict=True):
        vector = torch.tensor(got)
        assert torch.cosine_similarity(vector, want, 0) > 1 - 1e-3
        assert vector.norm() == pytest.approx(1, abs=1e-3)


def test_a_prefill_worker_gives_the_vectors_of_transformers(
    apart: Stack, wanted: list[torch.Tensor]
) -> None:
    """One text and several, text and ids; nothing is handed over or held."""
    check(embedded(apart, TEXTS), wanted)
    check(embedded(apart, TEXTS[:1]), wanted[:1])
    ids = posted(apart, "/tokenize", prompt=TEXTS[1]).json()["tokens"]
    answer = posted(apart, "/v1/embeddings", input=[ids, ids], dimensions=32).json()
    cut = wanted[1][:32]
    check([item["embedding"] for item in answer["data"]], [cut, cut])
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    assert apart.total("decode-0", "vllm:prompt_tokens_total") == 0
    assert apart.total("prefill-0", "vllm:prompt_tokens_total") > 80
    assert held_after(apart, FREE_SECONDS) == {}


def test_scores_and_ranks_are_cosines(apart: Stack, wanted: list[torch.Tensor]) -> None:
    units = [each / each.norm() for each in wanted]
    want = [float(units[0] @ each) for each in units]
    answer = posted(apart, "/v1/score", text_1=TEXTS[0], text_2=TEXTS).json()
    assert [item["score"] for item in answer["data"]] == pytest.approx(want, abs=2e-3)
    ranked = posted(apart, "/v1/rerank", query=TEXTS[0], documents=TEXTS, top_n=2).json()
    assert ranked["results"][0]["index"] == 0
    assert len(ranked["results"]) == 2


def test_what_the_model_cannot_do_is_a_bad_request(apart: Stack) -> None:
    """Dimensions beyond its own, classes without a head; then it goes on."""
    for path, body, param in (
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/classify", {"input": "a"}, "model"),
        ("/pooling", {"input": "a", "task": "classify"}, "task"),
    ):
        answer = posted(apart, path, **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param
    assert posted(apart, "/pooling", input="a", task="token_embed").status_code == 200
    assert held_after(apart, FREE_SECONDS) == {}


def test_vectors_beside_chats_of_many_clients(apart: Stack, wanted: list[torch.Tensor]) -> None:
    """Both kinds at once; each is what it is alone."""

    def said(_: int) -> str:
        body = {"prompt": TEXTS[0], "max_tokens": 8, "temperature": 0}
        text: str = posted(apart, "/v1/completions", **body).json()["choices"][0]["text"]
        return text

    alone = said(0)
    with ThreadPoolExecutor(8) as threads:
        chats = [threads.submit(said, index) for index in range(6)]
        for vectors in threads.map(lambda _: embedded(apart, TEXTS), range(4)):
            check(vectors, wanted)
        assert {each.result() for each in chats} == {alone}
    assert held_after(apart, FREE_SECONDS) == {}


def test_a_classifier_in_one_worker(smollm2: Path, tmp_path: Path) -> None:
    """Aggregated: classes and their names by a decode worker, and no tokens."""
    import transformers

    folder, model = classifier(smollm2, 3)
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)(TEXTS[0])["input_ids"]
    with Stack.running(str(folder), tmp_path / "log", prefill=0, worker_flags=EXACT) as stack:
        (item,) = posted(stack, "/classify", input=TEXTS[0]).json()["data"]
        probs = scores_of(model, ids).softmax(0)
        assert item["probs"] == pytest.approx(probs.tolist(), abs=1e-3)
        assert item["label"] == f"LABEL_{int(probs.argmax())}"
        answer = posted(stack, "/v1/completions", prompt="a", max_tokens=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        (vector,) = embedded(stack, ["a"])
        assert len(vector) == 48


def test_a_death_in_the_middle_is_not_seen(apart: Stack, wanted: list[torch.Tensor]) -> None:
    """SIGKILL to the prefill worker under load: every call has its vectors, from who is left.

    The worker is stopped first: else the calls may be over before it is killed.
    """
    failures = Growth(apart, "router", "tandem:router_attempt_failures_total")
    computed = Growth(apart, "decode-0", "vllm:prompt_tokens_total")
    with ThreadPoolExecutor(6) as threads:
        attempts = Growth(apart, "router", "tandem:router_attempts_total")
        apart.signal("prefill-0", signal.SIGSTOP)
        answers = [threads.submit(embedded, apart, TEXTS) for _ in range(11)]

        def asked() -> bool:
            """Whether an input is at a worker: all of an answered call's have left it."""
            answered = sum(each.done() for each in answers) * len(TEXTS)
            return attempts.now() > answered

        time.sleep(0.5)  # Answers on their way are read before it is judged.
        apart.until(asked, 2, "nothing at the stopped worker")
        apart.signal("prefill-0", signal.SIGKILL)
        for each in answers:
            check(each.result(timeout=120), wanted)
    assert computed.now() > 0
    assert failures.now() > 0
    running = "vllm:num_requests_running"
    apart.until(lambda: not apart.total("decode-0", running), FREE_SECONDS, "still held")
