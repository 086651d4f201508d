"""What launching costs the host, no graph: python bench/engine/launches.py [--tokens 640 2048].

Calls of ops one after the other, the device behind, which is the least that a launch takes; then
prompts alone, and when each of their layers was launched: the same launches take two to three times
as long there, and hosts differ from second to second. Prints ms; a layer of Qwen3-8B keeps the
device busy for 0.3 ms at 512 tokens, 0.6 at 1,024, 1.1 at 2,048.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rig import Rig
from steps import first_token_ms

from tandem.engine.models.decoder import Layer
from tandem.engine.worker.runner import ModelRunner
from tandem.kernels.activation import silu_and_mul
from tandem.kernels.gemm import linear, linear_add
from tandem.kernels.norm import rms_norm

CALLS, ROUNDS = 300, 5
PAUSE_S = 0.004


def us(call: Callable[[], object]) -> float:
    """Of one call among many: the least of some rounds."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - started) / CALLS * 1e6)
    return min(found)


def ops() -> dict[str, Callable[[], object]]:
    """The ops of a layer that is not in a graph, small."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")

    x, stream, wide = random(256, 4096), random(256, 4096), random(256, 8192)
    gain, weight = random(4096), random(4096, 4096)
    return {
        "torch.empty": lambda: torch.empty(256, 4096, device="cuda"),
        "x.add_(1)": lambda: x.add_(1),
        "rms_norm": lambda: rms_norm(x, gain, 1e-6),
        "silu_and_mul": lambda: silu_and_mul(wide),
        "linear": lambda: linear(x, weight),
        "linear_add": lambda: linear_add(x, weight, stream),
    }


def watch() -> list[list[float]]:
    """ms from a step's begin to the launch of each layer and to the end, a list a step."""
    steps: list[list[float]] = []
    layer: Any = Layer.__call__
    hidden: Any = ModelRunner.hidden

    def noted_layer(self: Layer, *args: Any) -> Any:
        steps[-1].append(time.perf_counter())
        return layer(self, *args)

    def noted_hidden(self: ModelRunner, *args: Any) -> Any:
        steps.append([])
        started = time.perf_counter()
        result = hidden(self, *args)
        steps[-1] = [1e3 * (at - started) for at in (*steps[-1], time.perf_counter())]
        return result

    Layer.__call__ = noted_layer  # type: ignore[method-assign]
    ModelRunner.hidden = noted_hidden  # type: ignore[method-assign]
    return steps


def main() -> None:
    """Ops, then prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[640, 1024, 2048])
    parser.add_argument("--prompts", type=int, default=20)
    args = parser.parse_args()
    for name, call in ops().items():
        print(f"{name}: {us(call):.1f} us")
    rig = Rig.start(max_model_len=16384, enforce_eager=True)
    steps = watch()
    for length in args.tokens:
        first_token_ms(rig, length)
        steps.clear()
        whole = []
        for _ in range(args.prompts):
            time.sleep(PAUSE_S)
            whole.append(first_token_ms(rig, length))
        at = [statistics.median(each) for each in zip(*steps, strict=True)]
        print(
            f"{length} tokens: first token {statistics.median(whole):.2f} ms; layers launched at "
            f"{at[0]:.2f}, {at[1]:.2f}, {at[2]:.2f} ... {at[-2]:.2f}, all at {at[-1]:.2f}; "
            f"a layer {statistics.median(b - a for a, b in itertools.pairwise(at)):.3f}"
        )


if __name__ == "__main__":
    main()
