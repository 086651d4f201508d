"""A budget of thinking through prefill and decode, and a death of the worker in the thought."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack
from tests.engine_run.thinkers import thinker_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BUDGET = 8
LONG = 48
"""Of a thought in which a worker dies: seconds to write."""
SEA = {
    "type": "object",
    "properties": {"depth": {"enum": ["deep", "shallow"]}},
    "required": ["depth"],
    "additionalProperties": False,
}
CHAT = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def thinker(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with marks of thoughts, one of which its template opens."""
    return thinker_of(smollm2, tmp_path_factory.mktemp("thinker") / "model")


def asked(stack: Stack, **fields: Any) -> Any:
    body = {
        "messages": CHAT,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 2 * BUDGET,
        "return_token_ids": True,
    }
    with httpx.Client(timeout=120) as client:
        answer = client.post(f"{stack.url}/v1/chat/completions", json={**body, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(answer: Any) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def streamed(stack: Stack, at: int, strike: Callable[[], None], **fields: Any) -> list[int]:
    """The tokens of a stream, in which something happens behind ``at`` of them."""
    body = {
        "messages": CHAT,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    tokens: list[int] = []
    url = f"{stack.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, **fields}, timeout=200) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            before = len(tokens)
            tokens += [t for c in chunk["choices"] for t in c.get("token_ids") or ()]
            if before < at <= len(tokens):
                strike()
    return tokens


@pytest.mark.nightly
def test_a_thought_ends_at_its_budget_also_where_a_worker_dies(
    thinker: Path, tmp_path: Path
) -> None:
    """By one worker's token and by the next one's; the answer goes on behind it."""
    flags = ["--reasoning-parser", "qwen3"]
    killed: list[str] = []

    def kill() -> None:
        names = ("decode-0", "decode-1")
        killed.extend(n for n in names if stack.total(n, "vllm:num_requests_running") > 0)
        stack.signal(killed[0], signal.SIGKILL)

    with Stack.running(
        str(thinker), tmp_path / "stack.log", prefill=1, decode=2, router_flags=flags
    ) as stack:
        stack.wait_ready()
        free = asked(stack)
        bounded = asked(stack, thinking_token_budget=BUDGET)
        none = asked(stack, thinking_token_budget=0, max_tokens=4)
        form = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SEA}}
        strict = {"thinking_token_budget": BUDGET, "response_format": form, "ignore_eos": False}
        formed = asked(stack, **strict, max_tokens=60)
        resumed = streamed(stack, 12, kill, thinking_token_budget=LONG, max_tokens=LONG + 8)

    close = tokens_of(none)[0]
    assert free["choices"][0]["message"]["reasoning"]
    assert close not in tokens_of(free)
    assert tokens_of(bounded)[:BUDGET] == tokens_of(free)[:BUDGET]
    assert tokens_of(bounded)[BUDGET] == close
    assert bounded["usage"]["completion_tokens_details"]["reasoning_tokens"] == BUDGET + 1
    assert bounded["choices"][0]["message"]["content"]
    assert not none["choices"][0]["message"].get("reasoning")
    # Not the thought of the others, whose first token is one that ends a text: a form forbids it.
    assert tokens_of(formed).index(close) == BUDGET
    assert json.loads(formed["choices"][0]["message"]["content"])["depth"] in ("deep", "shallow")
    assert len(killed) == 1
    assert resumed.index(close) == LONG
    assert len(resumed) == LONG + 8
