"""Prompts of embeddings through real stacks: the tokens that transformers gives for the ids."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from client import Answer, body_of, complete, events, held_after
from conftest import StackMaker
from reference import rows
from safetensors.torch import save as save_safetensors
from stack import Stack
from test_tokens import AGAIN, FEW, GROWN, SHORT, SOME, TIGHT, preemptions
from tests.engine_run.embedded import table_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = {
    ("prefill", "prefill"): 59,
    ("prefill", "decode"): 58,
    ("decode", "prefill"): 33,
    ("decode", "decode"): 32,
}
"""Prompts of which those that are struck in prefill have over 1,900 tokens. One for each, so that
none is in a cache."""
LONGER = SHORT[:4]
"""Asked for twice at once, they begin in 32 blocks of 16."""
COUNT = 512
"""Tokens of an answer in which a worker dies while it decodes."""
ROUTER = ["--request-timeout", "200"]
TAKES = ["--enable-prompt-embeds"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "aggregated, chunks of 64, no caching": {
        "prefill": 0,
        "worker_flags": [*TAKES, "--max-num-batched-tokens", "64", "--no-enable-prefix-caching"],
    },
    "aggregated, preempted, in a child": {
        "prefill": 0,
        "worker_flags": [*TAKES, *TIGHT, "--distributed-executor-backend", "mp"],
    },
    "pair, chunks of 64": {"worker_flags": [*TAKES, "--max-num-batched-tokens", "64"]},
    "pair, preempted": {"worker_flags": [*TAKES, *TIGHT]},
}
FIRST = ("aggregated, chunks of 64, no caching",)
"""Run by default; the others take a minute each."""


def embeds_of(model: Path, ids: Sequence[int]) -> str:
    """The table's rows of ids, as a client sends them."""
    vectors = table_of(model)[list(ids)].clone()
    return base64.b64encode(save_safetensors({"prompt_embeds": vectors})).decode()


def hold_to_reference(index: int, answer: Answer, count: int) -> None:
    """No error, and right to the last of ``count`` tokens."""
    assert answer.error is None, answer.error
    assert rows("small")[index].cut(count).verdict(answer.tokens) in ("equal", "excused")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[] if each in FIRST else pytest.mark.nightly) for each in LAYOUTS],
)
async def test_tokens_equal_transformers(layout: str, start_small: StackMaker, small: Path) -> None:
    """All at once, beside the same prompts as ids; again with prefix hits, where there are any."""
    preempted = "preempted" in layout
    indices, count = (LONGER, GROWN) if preempted else (SOME[:-1], FEW)  # longer: who kills workers
    cached = "no caching" not in layout
    with start_small(**LAYOUTS[layout], router_flags=ROUTER) as stack:
        async with httpx.AsyncClient(base_url=stack.url, timeout=240) as client:

            async def ask(index: int, count: int, *, embedded: bool) -> None:
                ids = rows()[index].prompt
                more = {"prompt_embeds": embeds_of(small, ids)} if embedded else {}
                answer = await complete(client, "" if embedded else ids, max_tokens=count, **more)
                hold_to_reference(index, answer, count)

            both = [ask(i, count, embedded=e) for e in (True, False) for i in indices]
            await asyncio.gather(*both)
            if cached:
                await asyncio.gather(*(ask(i, AGAIN, embedded=True) for i in indices))
                for _ in range(2):  # of many in few blocks all may have been gone
                    await ask(indices[0], AGAIN, embedded=True)
        hits = sum(stack.total(name, "vllm:prefix_cache_hits_total") for name in stack.workers)
        assert (hits > 0) is cached
        if "pair" in layout:
            assert stack.total("decode-0", "tandem:kv_handoff_bytes_total") > 0
        assert (preemptions(stack) > 0) is preempted
        assert held_after(stack, 20.0) == {}


@pytest.mark.parametrize(
    ("moment", "role"),
    [
        pytest.param("prefill", "decode", marks=pytest.mark.nightly),
        pytest.param("decode", "prefill", marks=pytest.mark.nightly),
        pytest.param("prefill", "prefill", marks=pytest.mark.nightly),
        pytest.param("decode", "decode", marks=pytest.mark.nightly),
    ],
)
async def test_a_killed_worker_costs_no_token(
    moment: str, role: str, hurt: Stack, small: Path
) -> None:
    """SIGKILL of P or D: vectors go again to who is left, with what was emitted behind them."""
    index, answer = LONG[moment, role], Answer()
    count = COUNT if moment == "decode" else FEW
    prompt = {"prompt_embeds": embeds_of(small, rows()[index].prompt)}
    async with httpx.AsyncClient(base_url=hurt.url, timeout=240) as client:

        async def collect() -> None:
            async for _ in events(client, "", answer, max_tokens=count, **prompt):
                pass

        task = asyncio.create_task(collect())
        if moment == "prefill":
            worker = await asyncio.to_thread(hurt.holder, role)
            assert not answer.tokens, "the prompt is too short for this test"
        else:
            enough = lambda: len(answer.tokens) >= 5  # noqa: E731
            await asyncio.to_thread(hurt.until, enough, 60, "no tokens")
            # P may be through with it: it is hurt all the same.
            worker = (
                "prefill-0" if role == "prefill" else await asyncio.to_thread(hurt.holder, role)
            )
            assert not task.done()
        await asyncio.to_thread(hurt.signal, worker, signal.SIGKILL)
        await task
    hold_to_reference(index, answer, count)


@pytest.mark.nightly
async def test_what_is_asked_beside_it(hurt: Stack, small: Path, tmp_path: Path) -> None:
    """By the openai package: choices, scores, structured output, min_tokens; and a batch of
    lines."""
    given = embeds_of(small, rows()[9].prompt)
    with openai.OpenAI(base_url=f"{hurt.url}/v1", api_key="none", max_retries=0) as client:

        def ask(prompt: Any, **more: Any) -> Any:
            extra = {**more.pop("extra_body", {})}
            if prompt == "":
                extra["prompt_embeds"] = given
            fields = {"max_tokens": 12, "seed": 3, "extra_body": extra, **more}
            return client.completions.create(model="smol", prompt=prompt, **fields)

        ids = rows()[9].prompt
        for more in (
            {"temperature": 0.8, "n": 3, "logprobs": 2},
            {"extra_body": {"structured_outputs": {"regex": "[a-z]{3,9}!"}}},
            {"extra_body": {"min_tokens": 12}, "temperature": 1.5},
            {"frequency_penalty": 1.0, "presence_penalty": 0.5, "temperature": 0},
        ):
            ours, theirs = ask("", **more), ask(ids, **more)
            for mine, other in zip(ours.choices, theirs.choices, strict=True):
                assert mine.text == other.text
                assert (mine.logprobs is None) is (other.logprobs is None)
                if mine.logprobs is not None:
                    assert mine.logprobs.tokens == other.logprobs.tokens
                    assert mine.logprobs.text_offset == other.logprobs.text_offset
            assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens == len(ids)
    body = {**body_of("", max_tokens=FEW), "prompt_embeds": given}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "tandem.cli", "run-batch", "--url", hurt.url]
    command += ["-i", str(source), "-o", str(target)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (choice,) = json.loads(target.read_text())["response"]["body"]["choices"]
    hold_to_reference(9, Answer(200, choice["token_ids"]), FEW)
