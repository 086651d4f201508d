"""A tiny model with random weights, so that ten thousand requests take minutes on a CPU.

Its weights are large: with those of a usual start, attention says next to nothing, and KV of
somebody else's prompt would give the same tokens.
"""

from __future__ import annotations

import shutil
from pathlib import Path

SPREAD = 0.4
"""Standard deviation of the weights; 0.02 is usual."""


def make_model(folder: Path, tokenizer: Path, seed: int = 0) -> Path:
    """Two layers of Llama over the tokenizer of another prepared folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=SPREAD,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    return folder
