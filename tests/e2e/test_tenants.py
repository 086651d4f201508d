"""Two API keys at a real pair: each finds its own prefixes, handed over, and none of the other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import body_of
from stack import Stack

ONE, TWO = "key-one", "key-two"
KEYS = ["--api-key", ONE, "--api-key", TWO]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def stack(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("tenants") / "stack.log"
    with Stack.running(str(small), log, reference="small", router_flags=KEYS) as running:
        yield running


def complete(stack: Stack, key: str, prompt: Any = PROMPT, **params: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    body = body_of(prompt, **{"max_tokens": 4, **params})
    answer = httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(answer: dict[str, Any]) -> int:
    """Tokens that were found in a cache."""
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


def test_a_tenants_prefixes_are_handed_over_and_found_by_it_alone(stack: Stack) -> None:
    """Both get the tokens of the same model; what one has asked is no hit for the other."""
    first, again = complete(stack, ONE), complete(stack, ONE)
    other, other_again = complete(stack, TWO), complete(stack, TWO)
    assert [cached(each) > 0 for each in (first, again, other, other_again)] == [
        *(False, True),
        *(False, True),
    ]
    answers = {tuple(each["choices"][0]["token_ids"]) for each in (first, again, other)}
    assert len(answers) == 1
    sent = stack.metrics("router")
    handed = 'tandem:router_attempts_total{kind="first",shape="handoff"}'
    assert sent[handed] == 4


def test_a_request_does_not_wait_for_hundreds_of_another_tenant(stack: Stack) -> None:
    """It is done long before they are."""
    with ThreadPoolExecutor(5) as pool:

        def hog(number: int) -> float:
            complete(stack, ONE, [f"{number} {each}" for each in range(80)], max_tokens=24)
            return time.monotonic()

        hogs = [pool.submit(hog, number) for number in range(3)]
        running = "vllm:num_requests_running"
        stack.until(lambda: stack.total("decode-0", running) > 1, 30.0, "none runs")
        complete(stack, TWO, "Hi", max_tokens=1)
        done = time.monotonic()
        assert not any(each.done() for each in hogs)
        assert all(each.result() > done for each in hogs)
