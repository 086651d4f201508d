"""AsyncLLM over a whole engine in this process: many requests, ended in every way."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.engine_plan.sim import SimExecutor

from tandem.engine.config import EngineConfig
from tandem.engine.core.client import InprocClient
from tandem.engine.core.engine_core import EngineCore
from tandem.llm.async_llm import AsyncLLM
from tandem.protocol.commands import CommandName
from tandem.protocol.errors import InvalidParameter, RequestFailed, TandemError
from tandem.protocol.outputs import FinishReason
from tandem.text.tokenizer import Tokenizer

BLOCKS = 48


@pytest.fixture
async def llm(smollm2: Path) -> AsyncIterator[AsyncLLM]:
    """A pretended model behind the real scheduler, short of blocks so that requests wait."""
    config = EngineConfig.of(
        smollm2, device="cpu", block_size=16, max_num_seqs=6, max_num_batched_tokens=64
    )
    core = EngineCore.launch(config, SimExecutor(BLOCKS, verify=True))
    llm = AsyncLLM(InprocClient(core), Tokenizer.load(smollm2))
    yield llm
    await llm.close()


async def follow(llm: AsyncLLM, number: int, chance: random.Random) -> int:
    """One request that ends in one of five ways; the outputs seen."""
    params: dict[str, Any] = {"output_kind": "delta", "max_tokens": 30, "n": number % 3 + 1}
    leave_after = chance.randrange(1, 8) if number % 5 == 0 else None
    if number % 5 == 1:
        params["stop"] = ["e", "a"]
    if number % 5 == 2:
        params["temperature"] = 9
    seen = 0
    stream = llm.generate(f"request {number} " * chance.randrange(1, 9), params, f"id-{number}")
    try:
        async with aclosing(stream) as outputs:
            async for _ in outputs:
                seen += 1
                if seen == leave_after:
                    break
    except InvalidParameter:
        assert number % 5 == 2
    return seen


async def test_whatever_ends_a_request_frees_its_blocks(llm: AsyncLLM) -> None:
    """Finished, stopped by text, closed early, cancelled or refused: nothing is left behind."""
    chance = random.Random(3)
    tasks = [asyncio.create_task(follow(llm, number, chance)) for number in range(60)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks[3::10]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    failures = [
        task.exception() for task in tasks if not task.cancelled() and task.exception() is not None
    ]
    assert failures == []
    stats = (await llm.call(CommandName.STATS)).values
    assert stats["free_blocks"] == stats["total_blocks"] == BLOCKS
    assert stats["running"] == stats["waiting"] == 0
    assert llm.num_running == 0


async def test_streamed_text_is_the_text_at_once(llm: AsyncLLM) -> None:
    """Deltas joined, the last cumulative text and the final text agree, choice by choice."""
    params = {"seed": 11, "max_tokens": 40, "n": 2, "stop": ["qu"], "ignore_eos": True}
    texts: dict[str, dict[int, str]] = {}
    for kind in ("delta", "cumulative", "final_only"):
        found = texts.setdefault(kind, {0: "", 1: ""})
        async for output in llm.generate("the same prompt", params | {"output_kind": kind}):
            for each in output.outputs:
                found[each.index] = (found[each.index] if kind == "delta" else "") + each.text

    assert texts["delta"] == texts["cumulative"] == texts["final_only"]
    assert texts["delta"][0] != texts["delta"][1]


async def test_a_second_request_reports_what_was_cached(llm: AsyncLLM) -> None:
    """The block hashes made here are those that the engine makes."""
    prompt = list(range(100, 150))
    cached = []
    for _ in range(2):
        async for output in llm.generate(prompt, {"max_tokens": 2, "output_kind": "final_only"}):
            cached.append(output.num_cached_tokens)
            assert output.outputs[0].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)

    assert cached == [0, 48]


async def test_logprobs_come_for_prompt_and_answer(llm: AsyncLLM) -> None:
    """One entry per token, with the texts of the vocabulary."""
    params = {"max_tokens": 3, "logprobs": 2, "prompt_logprobs": 1, "output_kind": "final_only"}
    outputs = [output async for output in llm.generate("a few tokens", params)]

    answer = outputs[0].outputs[0]
    prompt = outputs[0].prompt_logprobs
    assert prompt is not None
    assert prompt[0] is None
    assert len(prompt) == len(outputs[0].prompt_token_ids)
    assert answer.logprobs is not None
    for token, position in zip(answer.token_ids, answer.logprobs, strict=True):
        assert position.sampled.token_id == token
        assert len(position.top) == 2
        assert position.top[0].decoded_token == llm.tokenizer.token_text(position.top[0].token_id)


async def test_a_closed_engine_says_so(llm: AsyncLLM) -> None:
    await llm.close()

    with pytest.raises(RequestFailed) as caught:
        _ = [output async for output in llm.generate("hi")]
    assert isinstance(caught.value, TandemError)
