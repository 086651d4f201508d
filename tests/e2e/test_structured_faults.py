"""Answers under schemas while workers are killed: none that ends by itself is invalid."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from contextlib import suppress
from typing import Any

import httpx
import jsonschema
import pytest
from client import held_after
from conftest import StackMaker
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

USERS = 10
DEADLINE = 120.0
MAX_TOKENS = 60
FREE_SECONDS = 30.0
WORD: Any = {"type": "string", "minLength": 1, "maxLength": 8}
SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", None]}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{2}$"},
    {"anyOf": [{"type": "integer", "multipleOf": 7, "maximum": 999}, {"type": "boolean"}]},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "n": {"type": "integer", "minimum": 0, "maximum": 9},
                    "leaf": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
                },
                "required": ["n", "leaf"],
                "additionalProperties": False,
            }
        },
    },
    {
        "type": "object",
        "properties": {"at": {"prefixItems": [{"type": "number"}, WORD], "items": False}},
        "required": ["at"],
        "additionalProperties": False,
    },
    {"const": {"a": [1, "é", None]}},
    {
        "type": "object",
        "additionalProperties": {"type": "boolean"},
        "propertyNames": {"enum": ["x", "y"]},
        "minProperties": 1,
    },
]


@pytest.mark.nightly
@pytest.mark.parametrize("count", [20, 1_000])
def test_no_answer_is_invalid(start_stack: StackMaker, count: int) -> None:
    """At temperature 1, by prefill and decode workers of which one is killed every few seconds."""
    flags = ["--request-timeout", f"{DEADLINE:g}"]
    with start_stack(prefill=2, decode=2, router_flags=flags) as stack:
        seen, kills = asyncio.run(_play(stack, count))
        left = held_after(stack, FREE_SECONDS)

    print(f"{count} requests, {kills} kills: {dict(seen)}")
    assert left == {}
    assert kills > 0
    assert seen["invalid"] == 0
    assert seen["valid"] > 0.7 * count
    assert seen["valid"] + seen["cut"] == count


async def _play(stack: Stack, count: int) -> tuple[Counter[str], int]:
    """What became of the requests, and how often a worker was killed."""
    seen: Counter[str] = Counter()
    numbers, begun, over = iter(range(count)), asyncio.Event(), asyncio.Event()
    async with httpx.AsyncClient(base_url=stack.url, timeout=DEADLINE + 30) as client:

        async def user() -> None:
            for number in numbers:
                seen[await _ask(client, number)] += 1
                begun.set()

        kills = asyncio.create_task(_kill(stack, begun, over))
        await asyncio.gather(*(user() for _ in range(USERS)))
        over.set()
        return seen, await kills


async def _kill(stack: Stack, begun: asyncio.Event, over: asyncio.Event) -> int:
    """One worker after the other, each of them back before the next, the first when the first
    request is answered and others are under way. A forked one is back soon: pauses are longer than
    its start, so that no request is struck again and again within its deadline."""
    draw, kills = random.Random(7), 0
    await begun.wait()
    while not kills or not await _comes(over, draw.uniform(7.0, 9.0)):
        name = draw.choice(sorted(stack.workers))
        await asyncio.to_thread(stack.signal, name, signal.SIGKILL)
        kills += 1
        stack.restart(name)
        ready = stack.workers[name].check_ready
        await asyncio.to_thread(stack.until, ready, 60.0, f"{name} did not come back")
    return kills


async def _comes(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


async def _ask(client: httpx.AsyncClient, number: int) -> str:
    """valid, cut (by its length), invalid, or an error's code."""
    schema = SCHEMAS[number % len(SCHEMAS)]
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": f"Say something in JSON, no. {number}."}],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": MAX_TOKENS,
        "structured_outputs": {"json": schema, "disable_any_whitespace": True},
    }
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        return f"{answer.status_code}: {answer.text[:200]}"
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut"
    try:
        jsonschema.validate(
            json.loads(choice["message"]["content"]),
            schema,
            format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER,
        )
    except (ValueError, jsonschema.ValidationError) as error:
        print(number, choice["message"]["content"], error)
        return "invalid"
    return "valid"
