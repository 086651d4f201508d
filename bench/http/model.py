"""The model that is served while HTTP is measured: Qwen3-8B's shapes and a made vocabulary.

Every id has a text of its own of whole characters, so that a client sees a piece for every token,
whatever random weights draw. Without ``--weights`` the folder is for ``--load-format dummy``.
By hand: ``python bench/http/model.py FOLDER [--weights]``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine"))

from rig import QWEN3_8B  # noqa: E402

SHARD_LAYERS = 9


def entries(count: int) -> dict[str, int]:
    """A byte-level vocabulary: the bytes, then a word for each further id."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(len(others))]
    return {
        **{letter: number for number, letter in enumerate(letters)},
        **{f"Ġw{number}": number for number in range(len(letters), count)},
    }


def tokenizer(count: int) -> dict[str, Any]:
    """tokenizer.json of ``count`` entries. Prompts are given as ids, so there are no merges."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**level, "use_regex": True},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": entries(count), "merges": []},
    }


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


def write_weights(folder: Path) -> None:
    """The checkpoint's weights, in shards with an index. Requires a GPU."""
    import torch
    from safetensors.torch import save_file

    owners: dict[str, str] = {}
    shards: dict[str, dict[str, Any]] = {}
    for number, (name, shape) in enumerate(tensors()):
        file = f"model-{number // (11 * SHARD_LAYERS):05d}.safetensors"
        owners[name] = file
        scale = 0.02 if len(shape) > 1 else 1.0
        random = torch.randn(shape, dtype=torch.bfloat16, device="cuda") * scale
        shards.setdefault(file, {})[name] = random.cpu()
    for file, content in shards.items():
        save_file(content, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": owners}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def served(model: str | None, place: Path, flags: str) -> tuple[str, str]:
    """Return the served model and its workers' flags: ``model`` as it is. For None, these shapes
    with random weights and a context of 32,768, in a folder of ``place``."""
    if model is not None:
        return model, flags
    folder = write(place / "qwen3-8b")
    return str(folder), f"{flags} --load-format dummy --max-model-len 32768"


def write(folder: Path, *, layers: int | None = None, weights: bool = False) -> Path:
    """The folder; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**QWEN3_8B, "num_hidden_layers": layers or QWEN3_8B["num_hidden_layers"]}
    if weights and not (folder / "model.safetensors.index.json").exists():
        write_weights(folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 151645}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(config["vocab_size"])))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def main() -> None:
    """Write it where the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", action="store_true", help="16 GB of them; needs a GPU")
    args = parser.parse_args()
    write(args.folder, weights=args.weights)


if __name__ == "__main__":
    main()
