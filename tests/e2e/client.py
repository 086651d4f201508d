"""Plain HTTP requests of the end-to-end tests, in tokens, and what they leave on workers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
from stack import Stack


@dataclass
class Answer:
    """What one request gave: tokens as they came, or the error."""

    status: int = 0
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None


def body_of(prompt: list[int] | str, **params: Any) -> dict[str, Any]:
    """Greedy, 64 tokens, end-of-sequence ignored, unless ``params`` say otherwise."""
    body = {"model": "smol", "prompt": prompt, "temperature": 0, "max_tokens": 64}
    return {**body, "ignore_eos": True, "return_token_ids": True, **params}


async def complete(client: httpx.AsyncClient, prompt: list[int] | str, **params: Any) -> Answer:
    response = await client.post("/v1/completions", json=body_of(prompt, **params))
    content = response.json()
    if response.status_code != 200:
        return Answer(response.status_code, error=content["error"])
    choice = content["choices"][0]
    return Answer(200, choice["token_ids"], choice["text"], choice["finish_reason"])


async def events(
    client: httpx.AsyncClient, prompt: list[int] | str, answer: Answer, **params: Any
) -> AsyncGenerator[Answer, None]:
    """One completion streamed; yields ``answer``, grown, after each event."""
    body = body_of(prompt, stream=True, **params)
    async with client.stream("POST", "/v1/completions", json=body) as response:
        answer.status = response.status_code
        if response.status_code != 200:
            answer.error = json.loads(await response.aread())["error"]
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                answer.error = event["error"]
                yield answer
                return
            for choice in event["choices"]:
                answer.tokens += choice.get("token_ids") or []
                answer.text += choice["text"]
                answer.finish = choice["finish_reason"] or answer.finish
            yield answer


async def stream(client: httpx.AsyncClient, prompt: list[int] | str, **params: Any) -> Answer:
    answer = Answer()
    async for _ in events(client, prompt, answer, **params):
        pass
    return answer


async def gather(
    url: str, prompts: Iterable[list[int]], *, at_once: int = 16, **params: Any
) -> list[Answer]:
    """Completions of all prompts, a bounded number at a time, in the prompts' order."""
    gate = asyncio.Semaphore(at_once)

    async with httpx.AsyncClient(base_url=url, timeout=300) as client:

        async def one(prompt: list[int]) -> Answer:
            async with gate:
                return await complete(client, prompt, **params)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


HELD = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "tandem:kv_leases",
    "tandem:kv_leased_blocks",
    "tandem:kv_prefix_lent_blocks",
    "tandem:kv_prefix_pulls_open",
)


def held(stack: Stack) -> dict[str, float]:
    """What workers hold for requests: blocks in use, slots, leases, requests."""
    found = {}
    for name in stack.workers:
        samples = stack.metrics(name)
        for sample, value in samples.items():
            bare = sample.partition("{")[0]
            busy_slot = bare == "tandem:kv_slots" and 'state="free"' not in sample
            if busy_slot or bare in HELD:
                found[f"{name} {sample}"] = value
    return {name: value for name, value in found.items() if value}


def held_after(stack: Stack, seconds: float) -> dict[str, float]:
    """What is still held when all is free or the time is over."""
    deadline = time.monotonic() + seconds
    while (left := held(stack)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left
