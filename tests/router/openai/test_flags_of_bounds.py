"""Each limit reaches the server: a small one refuses a request that the default takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

from tandem.router.placement.forecast import Targets

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
TEXT: Any = {"model": "fake", "prompt": "Hi", "max_tokens": 1}
CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
DEEP: Any = [[[[[[[[[]]]]]]]]]
LITTLE = {
    "max_prompts": 2,
    "max_sequences": 3,
    "max_messages": 2,
    "max_bad_words": 1,
    "max_logit_bias": 1,
    "max_text_chars": 1_024,
    "max_json_values": 1_000,
    "max_json_depth": 8,
    "max_headers": 12,
    "max_header_bytes": 2_048,
}
BEYOND: list[tuple[str, dict[str, Any], int]] = [
    ("max_prompts", {**TEXT, "prompt": ["a"] * 3}, 400),
    ("max_sequences", {**TEXT, "n": 4}, 400),
    ("max_messages", {**CHAT, "messages": CHAT["messages"] * 3}, 400),
    ("max_bad_words", {**TEXT, "bad_words": ["a", "b"]}, 400),
    ("max_logit_bias", {**TEXT, "logit_bias": {"1": 1, "2": 1}}, 400),
    ("max_text_chars", {**TEXT, "prompt": "a" * 1_025}, 400),
    ("max_json_values", {**TEXT, "stop_token_ids": [1] * 1_001}, 413),
    ("max_json_depth", {**CHAT, "chat_template_kwargs": {"a": DEEP}}, 400),
]


def ask(served: Served, body: dict[str, Any], **more: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return served.post(path, json=body, **more)


def test_small_bounds_refuse_what_is_beyond_them(serve: Serve, decode: Make) -> None:
    """All at once; what is within them is answered."""
    served = serve(decode(), **LITTLE)
    for name, body, status in BEYOND:
        answer = ask(served, body)
        assert answer.status_code == status, f"{name}: {answer.text}"
    many = {f"x-{number}": "a" for number in range(12)}
    assert ask(served, TEXT, headers=many).status_code == 431
    assert ask(served, TEXT, headers={"x-long": "a" * 2_048}).status_code == 431
    assert ask(served, {**TEXT, "prompt": ["a"] * 2}).status_code == 200
    assert ask(served, {**CHAT, "messages": CHAT["messages"] * 2}).status_code == 200


@pytest.mark.full
def test_a_larger_bound_of_prompts_holds_for_inputs_and_documents(
    serve: Serve, decode: Make
) -> None:
    """Vectors and scores take 2,048 of them by default, and follow the flag beyond that."""
    served = serve(decode(), max_prompts=2_050)
    for count, status in ((2_050, 200), (2_051, 400)):
        texts = ["a"] * count
        bodies: dict[str, Any] = {
            "/v1/embeddings": {"input": texts},
            "/v1/rerank": {"query": "a", "documents": texts},
        }
        for path, body in bodies.items():
            answer = served.post(path, json=body)
            assert answer.status_code == status, (path, count, answer.text[:200])


@pytest.mark.parametrize("number", range(len(BEYOND)))
def test_by_default_they_do_not(well: Served, number: int) -> None:
    """So it is the flag that refused."""
    assert ask(well, BEYOND[number][1]).status_code == 200


def test_what_the_parts_are_told(serve: Serve, decode: Make) -> None:
    """Memory of the index and of answers that wait, and how long a prompt may wait for P."""
    served = serve(
        decode(),
        prefix_index_mib=1,
        max_stream_backlog_bytes=4_096,
        max_backlog_bytes=8_192,
        handoff_patience=7.5,
        target_ttft_ms=500,
        target_itl_ms=50,
    )
    router = served.app.state.router
    usual = serve(decode()).app.state.router
    assert router.fleet.index.max_entries * 256 == usual.fleet.index.max_entries
    backlog = router.dispatcher.backlog
    assert (backlog.stream_bytes, backlog.total_bytes) == (4_096, 8_192)
    policy = router.dispatcher._placing.policy
    assert (policy.patience, policy.targets) == (7.5, Targets(0.5, 0.05))
    policy = usual.dispatcher._placing.policy
    assert (policy.patience, policy.targets, policy.strict) == (0.05, Targets(0.3, 0.025), False)
    strict = serve(decode(), strict_handoff=True).app.state.router.dispatcher._placing.policy
    assert (strict.patience, strict.strict) == (math.inf, True)
