"""Prompts that are pooled against the rate at which a model computes prompts, in this process.

    python bench/engine/pooling.py MODEL ... [--prompts 512 --tokens 512 --rounds 5 --out FILE]

A MODEL is a prepared folder, or a name of ``pooling_shapes`` (qwen3-8b, bert-large and others) for
weights that no file holds. Of a decoder that rate is the one with one token drawn of each prompt,
through the same engine; of an encoder, which draws none, that of its layers alone, step by step,
with no scheduler before them. Then vectors, by the model's own way and by the mean, round by round
so that a machine that drifts drifts for all. Different prompts, nothing of them cached. Prints
medians, each one's share of the rate, and the products of the layers in TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from pooling_shapes import SHAPES, dummy_folder, flops_a_token, layers_alone

from tandem.engine.config.read import read_facts
from tandem.engine.executor.uniproc import UniProcExecutor
from tandem.llm import LLM, PoolingParams
from tandem.protocol.pooling import PoolingType

Ways = dict[str, Callable[[], object]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {model: measure(model, args) for model in args.models}
    if args.out is not None:
        on = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        said = {"device": on, "prompts": args.prompts, "tokens": args.tokens, "models": found}
        args.out.write_text(json.dumps(said, indent=1) + "\n")


def measure(model: str, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of each way, printed."""
    options: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "load_format": "dummy" if model in SHAPES else args.load_format,
        "enable_prefix_caching": False,
        "executor": (executor := UniProcExecutor()),
    }
    folder = str(dummy_folder(model)) if model in SHAPES else model
    if read_facts(folder).encoder is None:
        options["max_model_len"] = args.tokens + 16
    draw = random.Random(0)
    with LLM(folder, **options) as llm:
        worker = executor.worker
        config = worker._config
        high = min(30_000, llm.card.vocab_size)
        prompts = [
            [draw.randrange(100, high) for _ in range(args.tokens)] for _ in range(args.prompts)
        ]
        ways: Ways = {
            "vectors": lambda: llm.embed(prompts),
            "mean": lambda: llm.embed(prompts, PoolingParams(pooling_type=PoolingType.MEAN)),
        }
        one = {"max_tokens": 1, "temperature": 0}
        if config.facts.encoder is None:
            ways = {"one token": lambda: llm.generate(prompts, one, use_tqdm=False), **ways}
        else:
            ways = {"layers alone": lambda: layers_alone(worker, config, prompts), **ways}
        rates = measured(ways, args.prompts * args.tokens, args.rounds)
    base = next(iter(rates.values()))
    flops = flops_a_token(config.facts, args.tokens)
    for name, rate in rates.items():
        share = f"{rate / base:6.1%}  {rate * flops / 1e12:6.1f} TFLOP/s"
        print(f"{model:20} {name:12} {rate:12,.0f} tokens/s  {share}", flush=True)
    return rates


def measured(ways: Ways, num_tokens: int, rounds: int) -> dict[str, float]:
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
