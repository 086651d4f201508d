"""Prompts of embeddings over HTTP and gRPC: what reaches workers, what is refused, what is held."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker, Turn
from tests.router.http_server import ANSWER, Served
from tests.router.rpc_client import RpcClient
from tests.waiting import wait_for

from tandem.protocol.embeds import PLACEHOLDER
from tandem.protocol.hashing import hash_blocks, root_hash

Serve = Callable[..., Served]
Make = Callable[..., FakeWorker]
SIZE = 8
ROWS = torch.arange(40 * SIZE).reshape(40, SIZE) / 100


def saved(tensor: torch.Tensor) -> str:
    """Return a safetensors file as clients send it."""
    return base64.b64encode(safetensors({"prompt_embeds": tensor})).decode()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def start(serve: Serve, prefill: Make, decode: Make) -> Callable[..., Served]:
    """An app that takes embeddings, over a pair of workers that do."""

    def start(workers: dict[str, Any] | None = None, **settings: Any) -> Served:
        made = [make(prompt_embeds=SIZE, **workers or {}) for make in (prefill, decode)]
        return serve(*made, **settings)

    return start


def refused(served: Served, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = served.post("/v1/completions", json={"max_tokens": 4, **body})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_openai_package_and_both_legs(start: Callable[..., Served]) -> None:
    """The prompt is empty, the tensor is an extra field; vectors go to P and to D,
    with hashes of what they are, and count as prompt tokens."""
    served = start()
    with served.client() as client:
        answer = client.completions.create(
            model="fake", prompt="", max_tokens=80, extra_body={"prompt_embeds": saved(ROWS)}
        )
    assert answer.choices[0].text == ANSWER
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 40
    legs = [worker.submitted[-1] for worker in served.workers]
    for request in legs:
        assert request.prompt_token_ids == [PLACEHOLDER] * 40
        assert request.prompt_embeds is not None
        assert request.prompt_embeds.values == bytes_of(ROWS)
        assert (request.prompt_embeds.dtype, request.prompt_embeds.hidden_size) == ("float32", SIZE)
    digest = served.workers[0].card.fingerprint.digest
    root = root_hash(fingerprint=digest, block_size=16)
    hashes = hash_blocks(root, legs[0].prompt_token_ids, 16, legs[0].prompt_embeds)
    assert list(legs[0].block_hashes) == list(legs[1].block_hashes) == hashes
    assert hashes != hash_blocks(root, legs[0].prompt_token_ids, 16)


def test_several_and_a_text_behind_them(start: Callable[..., Served]) -> None:
    """Embeddings come first, in their order; n choices of each."""
    served = start()
    given = [saved(ROWS[:3]), saved(ROWS[:5].half())]
    body = {"prompt": "Hi", "prompt_embeds": given, "max_tokens": 2, "n": 2}
    answer = served.post("/v1/completions", json={**body, "return_token_ids": True}).json()
    assert [each["index"] for each in answer["choices"]] == list(range(6))
    assert [each["prompt_token_ids"] is None for each in answer["choices"]] == [True] * 4 + [
        False
    ] * 2
    lengths = sorted(len(each.prompt_token_ids) for each in served.workers[1].submitted)
    assert lengths == [2, 3, 5]
    assert answer["usage"]["prompt_tokens"] == 10
    streamed = served.post("/v1/completions", json={**body, "stream": True}).text
    assert streamed.endswith("data: [DONE]\n\n")
    assert streamed.count('"finish_reason":"length"') == 6


def test_truncation_and_offsets(start: Callable[..., Served]) -> None:
    """Vectors are cut at either end; logprobs have offsets of the answer alone."""
    served = start()
    for side, rows in (("left", ROWS[-6:]), ("right", ROWS[:6])):
        body = {"prompt_embeds": saved(ROWS), "max_tokens": 3, "truncate_prompt_tokens": 6}
        body |= {"truncation_side": side, "logprobs": 1}
        answer = served.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        request = served.workers[1].submitted[-1]
        assert request.prompt_embeds is not None
        assert request.prompt_embeds.values == bytes_of(rows)
        assert answer.json()["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2]


def test_what_is_refused_by_name(start: Callable[..., Served]) -> None:
    """Field, value, what is allowed; nothing reaches a worker, nothing is held."""
    served = start(max_prompt_embeds_bytes=64 << 10, max_prompts=4)
    right, wild = saved(ROWS), ROWS.clone()
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt_embeds": "no base64!"}, "prompt_embeds", "base64 of a saved tensor"),
        ({"prompt_embeds": right[:400]}, "prompt_embeds", "its values are not all"),
        (
            {"prompt_embeds": [right, "AAAA"]},
            "prompt_embeds[1]",
            "one tensor in a safetensors file",
        ),
        ({"prompt_embeds": saved(ROWS[:, :5].clone())}, "prompt_embeds", "8 values each"),
        ({"prompt_embeds": saved(ROWS.double())}, "prompt_embeds", "float32, float16, bfloat16"),
        ({"prompt_embeds": saved(ROWS[0])}, "prompt_embeds", "[positions, hidden_size]"),
        ({"prompt_embeds": saved(torch.zeros(2048, SIZE))}, "prompt_embeds", "2048"),
        ({"prompt_embeds": saved(torch.zeros(2046, SIZE))}, "max_tokens", "2048"),
        ({"prompt_embeds": saved(torch.zeros(3000, SIZE))}, "prompt_embeds", "at most 65536 bytes"),
        ({"prompt_embeds": saved(torch.zeros(9000, SIZE))}, "prompt_embeds", "at most 65536 bytes"),
        ({"prompt_embeds": [right] * 5}, "prompt_embeds", "at most 4 entries"),
        ({"prompt_embeds": [right] * 4, "prompt": "Hi"}, "prompt_embeds", "at most 4 entries"),
        ({"prompt_embeds": right, "n": 600}, "n", "128"),
        ({"prompt_embeds": right, "echo": True}, "echo", "has no text"),
        ({"prompt_embeds": right, "prompt_logprobs": 1}, "prompt_logprobs", "no token ids"),
        ({"prompt_embeds": right, "add_special_tokens": True}, "add_special_tokens", "no token"),
        ({"prompt_embeds": 5}, "prompt_embeds", ""),
        ({"prompt_embeds": []}, "prompt", "prompt_embeds in its place"),
        ({"prompt_embeds": ""}, "prompt", "prompt_embeds in its place"),
        ({}, "prompt", "prompt_embeds in its place"),
    ]
    for value in (float("nan"), float("inf"), -float("inf"), 40_000.0):
        wild = ROWS.clone()
        wild[-1, -1] = value
        cases.append(({"prompt_embeds": saved(wild)}, "prompt_embeds", "finite values"))
    for body, param, words in cases:
        error = refused(served, **body)
        assert error["param"] == param, (body.keys(), error)
        assert words in error["message"], error
    assert not any(worker.submitted for worker in served.workers)
    assert served.app.state.service.embeds.held_bytes == 0


def test_what_torch_saved_is_refused_with_how_to_convert_it(start: Callable[..., Served]) -> None:
    file = io.BytesIO()
    torch.save(ROWS, file)
    error = refused(start(), prompt_embeds=base64.b64encode(file.getvalue()).decode())
    assert error["param"] == "prompt_embeds"
    assert 'safetensors.torch.save({"prompt_embeds": tensor.contiguous()})' in error["message"]


def test_without_the_flag_of_workers_they_are_refused_by_name(serve: Serve, decode: Make) -> None:
    """Neutral values pass."""
    served = serve(decode())
    error = refused(served, prompt_embeds=saved(ROWS))
    assert error["param"] == "prompt_embeds"
    assert "--enable-prompt-embeds" in error["message"]
    assert served.post(
        "/v1/completions", json={"prompt": "Hi", "prompt_embeds": [], "max_tokens": 1}
    ).is_success


def test_other_endpoints_refuse_it_by_name(start: Callable[..., Served]) -> None:
    """Chats, vectors and scores are made of texts."""
    served, given = start(), saved(ROWS)
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/pooling", {"input": "Hi"}),
        ("/classify", {"input": "Hi"}),
        ("/v1/score", {"text_1": "Hi", "text_2": "Ho"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Ho"]}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {**chat, "max_tokens": 3}),
        ("/tokenize", {"prompt": "Hi"}),
    ):
        answer = served.post(path, json={**body, "prompt_embeds": given})
        assert answer.status_code == 400, (path, answer.text)
        assert "prompt_embeds" in answer.json()["error"]["message"], path


def test_workers_that_take_none_get_none(serve: Serve, prefill: Make, decode: Make) -> None:
    """Of a fleet in which some have the flag, only those are asked."""
    able = decode(prompt_embeds=SIZE, max_model_len=4096)
    others = [prefill(), decode(), decode()]
    served = serve(able, *others)
    for _ in range(4):
        body = {"prompt_embeds": saved(ROWS), "max_tokens": 2}
        assert served.post("/v1/completions", json=body).is_success
    assert len(able.submitted) == 4
    assert not any(worker.submitted for worker in others)


def hold(turn: Turn) -> Iterator[float]:
    """Accept, and end when the worker is let go of."""
    turn.accept()
    while not turn.worker.has_work:
        yield 0.01
    turn.token(0, token=turn.worker.end)


def test_bytes_that_are_held_are_bounded(start: Callable[..., Served]) -> None:
    """What does not fit beside others is 503 at once, ordinary requests go on, and all is let go
    of at the end, also of a client that left."""
    served = start({"behaviour": hold}, max_held_embeds_bytes=2000)
    intake = served.app.state.service.embeds
    body = {"prompt_embeds": saved(ROWS), "max_tokens": 4}  # 40 rows of 32 bytes, and a file
    answers: list[int] = []

    def ask() -> None:
        answers.append(served.post("/v1/completions", json=body).status_code)

    threads = [threading.Thread(target=ask)]
    threads[0].start()
    wait_for(lambda: any(worker.submitted for worker in served.workers))
    assert intake.held_bytes > 1280
    error = refused(served, 503, **body)
    assert error["message"] == "the server is at capacity; retry"
    for worker in served.workers:
        worker.has_work = True
    threads[0].join(20)
    assert answers == [200]
    wait_for(lambda: intake.held_bytes == 0)
    for worker in served.workers:
        worker.has_work = False
    before = [len(worker.submitted) for worker in served.workers]
    connection = served.raw_post("/v1/completions", {"model": "fake", **body, "stream": True})
    wait_for(lambda: [len(worker.submitted) for worker in served.workers] != before)
    assert intake.held_bytes > 1280
    connection.close()
    wait_for(lambda: intake.held_bytes == 0)
    wait_for(lambda: any(worker.cancelled for worker in served.workers))


def test_grpc(serve: Serve, decode: Make) -> None:
    """The bytes of the file; errors in the same words."""
    (port,) = own_ports(1)
    served = serve(decode(prompt_embeds=SIZE), grpc_port=port)
    client = RpcClient(port)
    try:
        (said,) = client.call("Generate", prompt_embeds=saved(ROWS), sampling={"max_tokens": 80})
        assert said["choices"][0]["text"] == ANSWER
        assert said["usage"]["prompt_tokens"] == 40
        request = served.workers[0].submitted[-1]
        assert request.prompt_embeds is not None
        assert request.prompt_embeds.values == bytes_of(ROWS)
        with pytest.raises(Exception, match="8 values each"):
            client.call("Generate", prompt_embeds=saved(ROWS[:, :3].clone()))
        with pytest.raises(Exception, match=r"prompt_embeds: .* is not allowed; bytes of a saved"):
            client.call("Generate", prompt_embeds="")
    finally:
        client.close()
