"""Killed workers of models with windows or recurrent states: answers go on with the right tokens.

The resumed request computes its prompt and its emitted tokens again, or takes them from a cache.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
from client import Answer, events
from conftest import DEADLINE, STEPS
from gemma3 import IS_INSTALLED, NUM_SHORT, WHY_SKIPPED, gemma_rows, prepared_gemma
from make_reference import greedy
from reference import Row
from stack import Stack
from tests.engine_run.tiny_models import class_of, folder_of
from tokenizers import decoders, models, pre_tokenizers

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(300)]

REAL = "gemma3-270m"
FAMILIES = (
    *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gemma3", "mistral-window")),
    pytest.param(
        REAL, marks=[pytest.mark.nightly, pytest.mark.skipif(not IS_INSTALLED, reason=WHY_SKIPPED)]
    ),
    "qwen3_5",
)
VOCABULARY = 320
MOST_TOKENS = 4096
LONG, SHORT = 2500, 300
"""Tokens of a prompt that is under way when P is killed, and of one whose answer is."""
FEW, MANY = 16, 384
"""Tokens of their answers."""


def with_tokenizer(name: str, folder: Path) -> None:
    """Copy the tiny model with room for more tokens and a tokenizer of bytes."""
    shutil.copytree(folder_of(name), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = MOST_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    known = sorted(pre_tokenizers.ByteLevel.alphabet())
    known += [f"<{each}>" for each in range(len(known), VOCABULARY)]
    vocabulary = {word: index for index, word in enumerate(known)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


def row(model: Any, length: int, count: int) -> Row:
    draw = random.Random(length)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(length)]
    return Row(prompt, *greedy(model, prompt, count))


def model_and_rows(name: str, folder: Path) -> tuple[Path, Row, Row]:
    """Return the folder of a model, a row for P and one for D."""
    if name == REAL:
        prepared = prepared_gemma().path
        rows = gemma_rows(prepared)
        return prepared, rows[-1], rows[NUM_SHORT]
    with_tokenizer(name, folder)
    model = class_of(name).from_pretrained(folder, dtype=torch.float32).eval()
    return folder, row(model, LONG, FEW), row(model, SHORT, MANY)


@pytest.fixture(scope="module", params=FAMILIES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Row, Row]]:
    """A stack of one prefill and two decode workers, and transformers' answers."""
    place = tmp_path_factory.mktemp(request.param)
    folder, long, short = model_and_rows(request.param, place / "model")
    running = Stack.running(
        str(folder),
        place / "stack.log",
        decode=2,
        worker_flags=STEPS,
        router_flags=["--request-timeout", f"{DEADLINE:g}"],
    )
    with running as stack:
        yield stack, long, short


async def struck(stack: Stack, asked: Row, role: str, after: int) -> Answer:
    """Kill the worker of ``role`` that has the request, after so many tokens."""
    answer = Answer()

    async def collect() -> None:
        async with httpx.AsyncClient(base_url=stack.url, timeout=DEADLINE + 30) as client:
            count = len(asked.tokens)
            async for _ in events(client, asked.prompt, answer, max_tokens=count):
                pass

    task = asyncio.create_task(collect())
    await asyncio.to_thread(stack.until, lambda: len(answer.tokens) >= after, 60, "no tokens")
    worker = await asyncio.to_thread(stack.holder, role)
    assert not task.done()
    assert (len(answer.tokens) > 0) == (after > 0)
    await asyncio.to_thread(stack.signal, worker, signal.SIGKILL)
    if role == "prefill":
        stack.restart(worker)
    await task
    return answer


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_killed_worker_changes_no_token(role: str, served: tuple[Stack, Row, Row]) -> None:
    """D is killed while it decodes, or P while it computes the prompt."""
    stack, long, short = served
    asked, after = (short, 5) if role == "decode" else (long, 0)
    answer = await struck(stack, asked, role, after)
    assert answer.error is None, answer.error
    assert asked.verdict(answer.tokens) in ("equal", "excused")
