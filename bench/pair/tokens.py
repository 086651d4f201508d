"""Comparison of a pair's tokens with those of one worker alone.

Prompts are windows of real text, some of them sharing their beginning with the one before. Where
two answers part, the worker that does both halves is asked again, at just that place, which token
it would take and by how much: in bfloat16 a near tie falls by who else is in the batch.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "reference"))

from reference import NEAR, rows  # noqa: E402

AT_ONCE = 16
SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Parting:
    """First difference of two answers to one prompt."""

    prompt: int
    num_prompt: int
    position: int
    theirs: int
    """Token of the reference answer."""
    ours: int
    decided: int
    """What one worker takes at that place when it is asked by itself."""
    gap: float
    """Of its two best tokens' log-probabilities there."""
    context: list[int] | None
    """All tokens before, for ../rounding.py; None where the gap is below ``NEAR``."""


def prompts(count: int, longest: int, seed: int = 5) -> list[list[int]]:
    """``count`` prompts of 20 to ``longest`` tokens, short ones as likely as long ones."""
    draw = random.Random(seed)
    corpus = [token for row in rows() for token in row.prompt]
    made: list[list[int]] = []
    for number in range(count):
        length = round(20 * (longest / 20) ** draw.random())
        begin = draw.randrange(len(corpus) - length)
        prompt = corpus[begin : begin + length]
        if number % 5 == 4:  # what is cached already, then something new
            shared = made[-1][: draw.randrange(1, len(made[-1]))]
            prompt = [*shared, *prompt][:longest]
        made.append(prompt)
    return made


async def answers(url: str, asked: list[list[int]], tokens: int, at_once: int) -> list[list[int]]:
    """Greedy tokens of each prompt."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:

        async def one(prompt: list[int]) -> list[int]:
            async with gate:
                choice = await _ask(client, prompt, tokens)
                found: list[int] = choice["token_ids"]
                return found

        return list(await asyncio.gather(*(one(prompt) for prompt in asked)))


async def partings(
    url: str, asked: list[list[int]], reference: list[list[int]], found: list[list[int]]
) -> list[Parting]:
    """Every place where ``found`` leaves ``reference``; ``url`` is one worker's."""
    made = []
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as client:
        for number, (prompt, theirs, ours) in enumerate(zip(asked, reference, found, strict=True)):
            pairs = enumerate(zip(theirs, ours, strict=True))
            at = next((at for at, (one, other) in pairs if one != other), None)
            if at is None:
                continue
            context = [*prompt, *theirs[:at]]
            choice = await _ask(client, context, 1, logprobs=5)
            chances = sorted(choice["logprobs"]["top_logprobs"][0].values(), reverse=True)
            decided = choice["token_ids"][0]
            gap = chances[0] - chances[1] if len(chances) > 1 else 0.0
            kept = context if gap >= NEAR else None
            pair = theirs[at], ours[at]
            made.append(Parting(number, len(prompt), at, *pair, decided, gap, kept))
    return made


async def _ask(
    client: httpx.AsyncClient, prompt: list[int], tokens: int, **more: Any
) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise RuntimeError(answer.text[:500])
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def _compare(pair: str, alone: str, count: int, longest: int, tokens: int) -> dict[str, Any]:
    asked = prompts(count, longest)
    one_by_one = await answers(alone, asked, tokens, 1)
    one = await answers(alone, asked, tokens, AT_ONCE)
    two = await answers(pair, asked, tokens, AT_ONCE)
    two_by_one = await answers(pair, asked, tokens, 1)
    looked = {
        f"pair, {AT_ONCE} at once, against one worker, {AT_ONCE} at once": (one, two),
        "pair, one by one, against one worker, one by one": (one_by_one, two_by_one),
        f"one worker, {AT_ONCE} at once, against itself one by one": (one_by_one, one),
    }
    result: dict[str, Any] = {"prompts": count, "tokens_each": tokens}
    result["prompt_tokens"] = sum(map(len, asked))
    for name, (reference, found) in looked.items():
        parted = await partings(alone, asked, reference, found)
        result[name] = {
            "equal": count - len(parted),
            "parted": [asdict(each) for each in parted],
            "largest_gap": max((each.gap for each in parted), default=0.0),
        }
    return result


def compare(pair: str, alone: str, *, count: int, longest: int, tokens: int) -> dict[str, Any]:
    """Answers of a pair of workers beside those of one, and of one beside its own."""
    return asyncio.run(_compare(pair, alone, count, longest, tokens))
