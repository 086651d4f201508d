"""Builders of small models: a folder, and a GGUF file of any supported family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import save_file

VOCAB = ["<|end|>", "<think>", "a", "b", "Ġ", "1", "2", "ĠĠ", "ab", "Ġa"]
MERGES = ["a b", "Ġ Ġ", "Ġ a"]
PIECES = {
    "<pad>": (3, -1000.0),
    "<eos>": (3, -1000.0),
    "<bos>": (3, -1000.0),
    "<unk>": (3, -1000.0),
    "\n\n": (4, -1000.0),
    "  ": (4, -1000.0),
    **{f"<0x{byte:02X}>": (6, 0.0) for byte in range(256)},
    "ab": (1, -1.0),
    "▁a": (1, -2.0),
    "bc": (1, -3.0),
    "▁": (1, -4.0),
    "a": (1, -5.0),
    "b": (1, -6.0),
    "c": (1, -7.0),
}
"""Type and score of each token of a SentencePiece vocabulary."""
SERVABLE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 4_096,
    "dtype": "float32",
}
"""What config.json says of a model that can be served."""
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 64


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Builds a folder in Hugging Face's layout; weights differ by seed."""

    def build(name: str = "model", *, seed: int = 0, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | config
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "tokenizer.json").write_text("{}")
        values = np.random.default_rng(seed).standard_normal((512, 512), dtype=np.float32)
        save_file({"lm_head.weight": values}, folder / "model.safetensors")
        return folder

    return build


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Builds a one-layer GGUF file; see ``write_gguf``."""

    def build(family: str = "llama", **changes: Any) -> Path:
        return write_gguf(tmp_path / f"tiny-{family}.gguf", family, **changes)

    return build


def write_gguf(
    path: Path,
    family: str,
    *,
    kind: str = "F32",
    kinds: dict[str, str] | None = None,
    extra: dict[str, Any] | None = None,
    without: tuple[str, ...] = (),
    tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a one-layer GGUF file. ``without`` and ``extra`` change its keys, ``without`` and
    ``tensors`` its tensors, ``kinds`` the types of some; arrays of uint8 are blocks."""
    writer = GGUFWriter(path, family)
    for key, value in (_keys(family) | (extra or {})).items():
        if key not in without:
            _add_key(writer, key, value)
    for name, values in (tiny_tensors(family) | (tensors or {})).items():
        if name not in without:
            of = (kinds or {}).get(name, kind if values.ndim > 1 else "F32")
            _add_tensor(writer, name, values, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_tensors(family: str) -> dict[str, np.ndarray]:
    """Seeded float32 tensors of one layer, under llama.cpp's names."""
    rng = np.random.default_rng(7)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(PIECES if family == "gemma3" else VOCAB), HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (INNER, HIDDEN),
        "blk.0.ffn_up.weight": (INNER, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, INNER),
    }
    if family == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": (HEADS * HEAD_DIM,) for part in "q"}
        shapes |= {f"blk.0.attn_{part}.bias": (KV_HEADS * HEAD_DIM,) for part in "kv"}
    if family == "gemma3":
        norms = ("post_attention_norm", "post_ffw_norm")
        shapes |= {f"blk.0.{name}.weight": (HIDDEN,) for name in norms}
    if family in ("qwen3", "gemma3"):
        shapes |= {f"blk.0.attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    return {
        name: rng.standard_normal(shape, dtype=np.float32) * 0.1 for name, shape in shapes.items()
    }


def _keys(family: str) -> dict[str, Any]:
    own = {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if family == "gemma3":
        own["attention.sliding_window"] = 64
    tokenizer = _sentencepiece() if family == "gemma3" else _byte_level(family)
    return {
        **{f"{family}.{key}": value for key, value in own.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
    }


def _sentencepiece() -> dict[str, Any]:
    kinds, scores = zip(*PIECES.values(), strict=True)
    return {
        "model": "llama",
        "tokens": list(PIECES),
        "token_type": list(kinds),
        "scores": list(scores),
        "add_space_prefix": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
    }


def _byte_level(family: str) -> dict[str, Any]:
    return {
        "model": "gpt2",
        "pre": "smollm" if family == "llama" else "qwen2",
        "tokens": VOCAB,
        "token_type": [3, 4, *[1] * (len(VOCAB) - 2)],
        "merges": MERGES,
        "eos_token_id": 0,
    }


def _add_key(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    qtype = GGMLQuantizationType[kind]
    blocks = values if values.dtype == np.uint8 else quantize(values, qtype)
    writer.add_tensor(name, blocks, raw_dtype=qtype)


def blocks_of(kind: str) -> dict[str, Any]:
    """Return arguments of ``gguf_file`` for matrices of drawn blocks of a kind, which the gguf
    package need not be able to quantize. Widths are two blocks."""
    values, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    width, draw = 2 * values, np.random.default_rng(5)
    rows = {name: len(each) for name, each in tiny_tensors("llama").items() if each.ndim == 2}
    rows |= {"blk.0.attn_output.weight": width, "blk.0.ffn_down.weight": width}
    rows |= {f"blk.0.ffn_{each}.weight": width for each in ("gate", "up")}
    rows |= {
        f"blk.0.attn_{each}.weight": width // of for each, of in (("q", 1), ("k", 2), ("v", 2))
    }
    norms = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
    tensors = {name: draw.uniform(0.5, 1.5, width).astype(np.float32) for name in norms}
    for name, count in rows.items():
        blocks = draw.integers(0, 256, (count * 2, size), dtype=np.uint8)
        for at in _FACTORS.get(kind, (0, 2)):
            factors = draw.uniform(-1, 1, (count * 2, 1)) * 2 / 2 ** _BITS[kind] / width**0.5
            blocks[:, at : at + 2] = factors.astype(np.float16).view(np.uint8)
        tensors[name] = blocks.reshape(count, -1)
    sizes = {"embedding_length": width, "feed_forward_length": width}
    sizes["attention.key_length"] = width // HEADS
    return {
        "kind": kind,
        "tensors": tensors,
        "extra": {f"llama.{key}": value for key, value in sizes.items()},
    }


_FACTORS = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}
"""Offsets of a block's float16 factors; (0, 2) for other kinds."""
_BITS = {"Q8_0": 7, "Q4_0": 3, "Q4_1": 4, "Q5_0": 4, "Q5_1": 5, "Q4_K": 10, "Q5_K": 11, "Q6_K": 12}
"""Bits of the product of a block's codes and inner scales."""
