"""The line as a user meets it: an answer, tokens over NIXL, everything free afterwards."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import openai
import pytest
from client import Answer, complete, events, held_after, stream
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

FREE_SECONDS = 10.0
PARTY = "\N{PARTY POPPER}" * 12
"""SmolLM2 continues it, and each takes several byte tokens."""


async def test_the_capital_of_france_is_paris_over_nixl(pair: Stack) -> None:
    """The openai package gets Paris, and the KV crossed NIXL."""
    before = pair.total("decode-0", "tandem:kv_handoff_bytes_total")
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none") as client:
        chat = await client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "Say it: what is the capital of France?"}],
            temperature=0,
        )

    assert "Paris" in (chat.choices[0].message.content or "")
    assert pair.total("decode-0", "tandem:kv_handoff_bytes_total") > before
    sample = 'tandem:kv_transport_info{connector="nixl",fallback="0",role="consumer"}'
    assert pair.metrics("decode-0")[sample] == 1


def test_a_character_of_several_tokens_arrives_in_one_chunk(pair: Stack) -> None:
    asked: Any = {"model": "smol", "prompt": PARTY, "temperature": 0, "max_tokens": 12}
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        create: Any = client.completions.create
        whole = create(**asked, extra_body={"return_token_ids": True})
        pieces = [each.choices[0].text for each in create(**asked, stream=True)]

    assert "".join(pieces) == whole.choices[0].text
    assert PARTY[0] in whole.choices[0].text
    assert len(whole.choices[0].text) < len(whole.choices[0].model_extra["token_ids"])
    assert all("\ufffd" not in piece for piece in pieces[:-1])


async def one_of_many(client: httpx.AsyncClient, draw: random.Random, many: int, most: int) -> str:
    """A request that ends, is cancelled, or is dropped at a random moment."""
    prompt = rows()[draw.randrange(many)].prompt
    params = {"max_tokens": draw.randint(1, most), "n": draw.choice([1, 1, 1, 2])}
    end = draw.choice(["whole", "stream", "drop", "cancel"])
    if end == "whole":
        await complete(client, prompt, **params)
    elif end == "stream":
        await stream(client, prompt, **params)
    elif end == "drop":
        limit, answer = draw.randint(0, 4), Answer()
        async for grown in events(client, prompt, answer, **params):
            if len(grown.tokens) >= limit:
                break
    else:
        task = asyncio.create_task(complete(client, prompt, **params))
        await asyncio.sleep(draw.random())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return end


async def storm(stack: Stack, count: int, many: int, most: int = 12) -> None:
    """Random requests over so many prompts, of up to ``most`` tokens; then everything is free soon
    after the last."""
    draw = random.Random(count)
    gate = asyncio.Semaphore(12)
    async with httpx.AsyncClient(base_url=stack.url, timeout=300) as client:

        async def bounded(seed: int) -> str:
            async with gate:
                return await one_of_many(client, random.Random(seed), many, most)

        ends = await asyncio.gather(*(bounded(draw.randrange(2**32)) for _ in range(count)))
    left = await asyncio.to_thread(held_after, stack, FREE_SECONDS)
    assert not left, left
    assert len(set(ends)) == 4


@pytest.mark.nightly
async def test_everything_is_free_after_a_small_storm(small_pair: Stack) -> None:
    """Sixty requests that end, are cancelled or disconnect leave nothing behind."""
    await storm(small_pair, 60, 30, most=60)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
async def test_everything_is_free_after_five_hundred(pair: Stack) -> None:
    """Five hundred of them do not either."""
    await storm(pair, 500, 30)
