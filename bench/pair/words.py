"""A small model whose tokens hang on all of its KV: python bench/pair/words.py FOLDER.

Random weights, so large that another prompt's KV gives other tokens, of Qwen3's form (six layers,
eight heads of 64, four KV heads) and of SmolLM2's vocabulary, whose ids the prompts of run.py are:
``run.py --only tokens --words FOLDER`` compares tokens where the real model cannot be had.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "http"))

import model as made  # noqa: E402

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD, INNER = 49152, 512, 6, 8, 4, 64, 1024


def weights() -> dict[str, Tensor]:
    """By the names of a checkpoint, in bfloat16; the same each time."""
    draw = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=draw) * scale / columns**0.5).bfloat16()

    def ones(size: int, value: float = 1.0) -> Tensor:
        return torch.full((size,), value, dtype=torch.bfloat16)

    found = {
        "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, HIDDEN**0.5),
        "lm_head.weight": matrix(VOCABULARY, HIDDEN, 3.0),
        "model.norm.weight": ones(HIDDEN),
    }
    for layer in range(LAYERS):
        of = f"model.layers.{layer}."
        found |= {
            f"{of}self_attn.q_proj.weight": matrix(HEADS * HEAD, HIDDEN, 2.0),
            f"{of}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            f"{of}self_attn.v_proj.weight": matrix(KV_HEADS * HEAD, HIDDEN, 2.0),
            f"{of}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD, 2.0),
            f"{of}self_attn.q_norm.weight": ones(HEAD, 1.5),
            f"{of}self_attn.k_norm.weight": ones(HEAD, 1.5),
            f"{of}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{of}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{of}mlp.down_proj.weight": matrix(HIDDEN, INNER),
            f"{of}input_layernorm.weight": ones(HIDDEN),
            f"{of}post_attention_layernorm.weight": ones(HIDDEN),
        }
    return found


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where; some 130 MB")
    folder = made.write(parser.parse_args().folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "intermediate_size": INNER,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 4096,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCABULARY - 1}))
    (folder / "tokenizer.json").write_text(json.dumps(made.tokenizer(VOCABULARY)))
    save_file(weights(), folder / "model.safetensors")


if __name__ == "__main__":
    main()
