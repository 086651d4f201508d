"""A llama of random weights behind SmolLM2's tokenizer, for tests of what is around a model.

A token of it costs a hundredth of one of SmolLM2. Its tokens depend on all of the prompt, and
``rows("small")`` of tests/reference holds those that transformers gives. Weights are sums of raw
bits: every release of numpy draws the same ones, while its normal numbers may change.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 4, 64, 128, 4, 2
HEAD = HIDDEN // HEADS
SPECIAL = 17
"""Tokens at the start of the vocabulary that are not text. Their embeddings are zero, so that no
greedy answer has one."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write_small_model(smollm2: Path, folder: Path) -> Path:
    """Write the model into ``folder``, which must not exist, and return the folder."""
    folder.mkdir(parents=True)
    for name in TOKENIZER:
        shutil.copy(smollm2 / name, folder)
    config = json.loads((smollm2 / "config.json").read_text())
    del config["quantization_config"]
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(config["vocab_size"]), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights(vocabulary: int) -> dict[str, NDArray[np.float32]]:
    draw = np.random.PCG64(1)

    def normal(*shape: int, mean: float = 0.0, scale: float = 0.3) -> NDArray[np.float32]:
        raw = np.asarray(draw.random_raw(int(np.prod(shape)))).astype("<u8")
        sums = raw.view("<u2").reshape(*shape, 4).sum(-1, dtype=np.float32) / 65536 - 2.0
        numbers: NDArray[np.float32] = (mean + scale * 1.7320508 * sums).astype(np.float32)
        return numbers

    embeddings = normal(vocabulary, HIDDEN)
    embeddings[:SPECIAL] = 0.0
    weights = {"model.embed_tokens.weight": embeddings}
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {f"{name}.{each}.weight": normal(*shapes[each]) for each in shapes}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = normal(HIDDEN, mean=1.0, scale=0.2)
    weights["model.norm.weight"] = normal(HIDDEN, mean=1.0, scale=0.2)
    return weights
