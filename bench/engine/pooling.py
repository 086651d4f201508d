"""Prompts that are pooled against prompts that draw a token, through one engine in this process.

    python bench/engine/pooling.py MODEL [--prompts 512 --tokens 512 --rounds 5 --out FILE]

A batch of different prompts, nothing of it cached: tokens a second with one token drawn of each
(the prefill rate), then vectors by the last token and by the mean, round by round so that a machine
that drifts drifts for all. Prints medians and each one's share of the prefill rate.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.llm import LLM, PoolingParams
from tandem.protocol.pooling import PoolingType


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options: dict[str, Any] = {
        "device": args.device,
        "load_format": args.load_format,
        "max_model_len": args.tokens + 16,
        "enable_prefix_caching": False,
    }
    draw = random.Random(0)
    with LLM(args.model, **options) as llm:
        high = min(30_000, llm.card.vocab_size)
        prompts = [
            [draw.randrange(100, high) for _ in range(args.tokens)] for _ in range(args.prompts)
        ]
        one = {"max_tokens": 1, "temperature": 0}
        mean = PoolingParams(pooling_type=PoolingType.MEAN)
        ways: dict[str, Callable[[], object]] = {
            "one token": lambda: llm.generate(prompts, one, use_tqdm=False),
            "last": lambda: llm.embed(prompts),
            "mean": lambda: llm.embed(prompts, mean),
        }
        rates = measured(ways, args.prompts * args.tokens, args.rounds)
    base = rates["one token"]
    for name, rate in rates.items():
        print(f"{name:10} {rate:12,.0f} tokens/s  {rate / base:6.1%}")
    if args.out is not None:
        said = {"prompts": args.prompts, "tokens": args.tokens, "tokens_per_s": rates}
        args.out.write_text(json.dumps(said, indent=1) + "\n")


def measured(
    ways: dict[str, Callable[[], object]], num_tokens: int, rounds: int
) -> dict[str, float]:
    """Median tokens a second of each; the first round is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            rates[name].append(num_tokens / (time.perf_counter() - started))
    return {name: statistics.median(each[1:]) for name, each in rates.items()}


if __name__ == "__main__":
    main()
