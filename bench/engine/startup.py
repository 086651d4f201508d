"""Measure a start up to the first token: python bench/engine/startup.py FOLDER --out OUT.

Writes 16 GB of random weights in Qwen3-8B's shapes to FOLDER (once; they are then in the page
cache) and starts run.py on them in fresh processes, the second time with compiled kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rig import QWEN3_8B
from safetensors.torch import save_file

HERE = Path(__file__).parent
SHARD_LAYERS = 9


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Qwen3-8B's checkpoint."""
    hidden, inner, vocabulary = 4096, 12288, QWEN3_8B["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(QWEN3_8B["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for name, out in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096)):
            yield f"{at}.self_attn.{name}_proj.weight", (out, 4096)
        for name in ("q", "k"):
            yield f"{at}.self_attn.{name}_norm.weight", (128,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{at}.mlp.up_proj.weight", (inner, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write(folder: Path) -> None:
    """The checkpoint, in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    owners: dict[str, str] = {}
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, shape) in enumerate(tensors()):
        file = f"model-{number // (11 * SHARD_LAYERS):05d}.safetensors"
        owners[name] = file
        scale = 0.02 if len(shape) > 1 else 1.0
        random = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale
        shards.setdefault(file, {})[name] = random.cpu()
    for file, content in shards.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    index = {"metadata": {}, "weight_map": owners}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    """Write the weights unless they are there, then start twice: cold kernels, kept kernels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    args = parser.parse_args()
    if not (args.folder / "config.json").exists():
        started = time.perf_counter()
        write(args.folder)
        print(f"weights written in {time.perf_counter() - started:.1f} s", flush=True)
    torch.cuda.empty_cache()
    cache = args.folder / "kernels"
    for turn in ("cold", "kept"):
        if turn == "cold":
            shutil.rmtree(cache, ignore_errors=True)
        command = [sys.executable, str(HERE / "run.py"), "--only", "start"]
        command += ["--folder", str(args.folder), "--out", str(args.out / turn)]
        started = time.perf_counter()
        environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
        subprocess.run(command, check=True, cwd=HERE, env=environment, timeout=300)
        print(f"{turn}: process ended {time.perf_counter() - started:.1f} s after it began")


if __name__ == "__main__":
    main()
