"""GGUF tensors → safetensors files, with transformers' names.

Rows: llama.cpp stores the q and k rows of llama-family heads with rotary pairs side by side. Here
the first halves of all pairs come first, as in transformers. Files of Qwen and Gemma already do.

Norms: llama.cpp stores Gemma's as the factor, transformers as the factor less one.

Type: matrices of ``PACKED`` kinds stay packed, as uint8 [rows, bytes of a row]. Rows are whole
blocks, so that their order may change. Plain tensors keep their type. Values of other kinds need 15
bits or more, so they become float32 if the whole model has at most 4 GiB in it, else bfloat16.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf import gemma
from tandem.hub.gguf.reader import PLAIN_TYPES, GgufTensor

EXACT_LIMIT_BYTES = 4 << 30
SHARD_BYTES = 2 << 30
PACKED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"})
"""Kinds that the engine multiplies as they are."""

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_TYPE = "gemma3_text"
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
"""Tensors that are no parameters; ``config`` reads them."""

_ROTARY = re.compile(r"blk\.\d+\.attn_(?P<which>[qk])\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Target:
    """Tensor to write: source, name and order of rows."""

    name: str
    tensor: GgufTensor
    order: npt.NDArray[np.intp] | None
    offset: float
    """Number that is subtracted from the stored values."""

    @property
    def packed(self) -> bool:
        return self.tensor.kind in PACKED and len(self.tensor.shape) == 2

    def values(self) -> npt.NDArray[np.float32]:
        rows = self.tensor.rows(self.order)
        return rows - np.float32(self.offset) if self.offset else rows

    def encoded(self, dtype: str) -> tuple[str, npt.NDArray[Any]]:
        """Return the tensor's type in safetensors and its values; ``dtype`` is that of dequantized
        ones. Packed and plain values are mapped from the file, unless they are changed."""
        if self.packed:
            return "uint8", self._stored()
        plain = PLAIN_TYPES.get(self.tensor.kind)
        if plain is None or self.offset:
            dtype = dtype if plain is None else "float32"
            return dtype, _encoded(self.values(), dtype)
        data = self._stored()
        return plain, data.astype(data.dtype.newbyteorder("<"), copy=False)

    def _stored(self) -> npt.NDArray[Any]:
        data = self.tensor.data
        return data if self.order is None else data[self.order]


def transformers_name(name: str, model_type: str = "llama") -> str | None:
    """Return transformers' name of a GGUF tensor; None if it is unknown."""
    layer = _GEMMA_LAYER if model_type == _GEMMA_TYPE else _LAYER
    stem, _, part = name.rpartition(".")
    if part not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{part}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is None or found[2] not in layer:
        return None
    return f"model.layers.{found[1]}.{layer[found[2]]}.{part}"


def plan(tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> list[Target]:
    """Return all tensors to write, in the file's order.

    Raises UnsupportedModel for unknown or missing tensors, or wrong shapes.
    """
    kind = config["model_type"]
    names = {name: transformers_name(name, kind) for name in tensors if name not in _NOT_WEIGHTS}
    unknown = sorted(name for name, found in names.items() if found is None)
    if unknown:
        raise UnsupportedModel(
            f"model: {len(unknown)} tensors have no place in {config['architectures'][0]}: "
            f"{', '.join(unknown[:4])}"
        )
    _check_shapes(tensors, config)
    return [
        Target(found, tensors[name], _row_order(name, config), _offset(name, kind))
        for name, found in names.items()
        if found is not None
    ]


def _check_shapes(tensors: Mapping[str, GgufTensor], config: Mapping[str, Any]) -> None:
    needed = _needed(config)
    for name, shape in needed.items():
        found = tensors.get(name)
        if found is None:
            raise UnsupportedModel(f"model: the file lacks the tensor {name}")
        if found.shape != shape:
            raise UnsupportedModel(
                f"model: the tensor {name} has shape {found.shape}; its keys make it {shape}"
            )
    for name, tensor in tensors.items():
        weight = needed.get(f"{name.removesuffix('bias')}weight")
        if name.endswith(".bias") and (weight is None or tensor.shape != weight[:1]):
            raise UnsupportedModel(f"model: the tensor {name} has shape {tensor.shape}")
        if name in ("output.weight", "rope_freqs.weight") or name.endswith(".bias"):
            continue
        if name not in needed:
            raise UnsupportedModel(
                f"model: the tensor {name} has no place among {config['num_hidden_layers']} layers"
            )


def _needed(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "attn_q": (query, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, query),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if config["model_type"] == _GEMMA_TYPE:
        layer |= dict.fromkeys(("post_attention_norm", "post_ffw_norm"), (hidden,))
    if config["model_type"] in ("qwen3", _GEMMA_TYPE):
        layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (config["head_dim"],))
    top = {
        "token_embd.weight": (config["vocab_size"], hidden),
        "output_norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        top["output.weight"] = (config["vocab_size"], hidden)
    return top | {
        f"blk.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }


def target_dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """Return the dtype in which the weights are written, by the rule of this module."""
    kinds = {tensor.kind for tensor in tensors.values() if len(tensor.shape) > 1}
    if len(kinds) == 1 and (plain := PLAIN_TYPES.get(next(iter(kinds)))):
        return plain
    exact = 4 * sum(tensor.size for tensor in tensors.values())
    return "float32" if exact <= EXACT_LIMIT_BYTES else "bfloat16"


def packed_kinds(targets: list[Target]) -> dict[str, list[str]]:
    """Return the names of packed layers, without suffix, by their kind."""
    found: dict[str, list[str]] = {}
    for each in targets:
        if each.packed:
            found.setdefault(each.tensor.kind, []).append(each.name.removesuffix(".weight"))
    return dict(sorted(found.items()))


def write(
    targets: list[Target], folder: Path, dtype: str, advance: Callable[[int], None]
) -> dict[str, Any]:
    """Write the weight files, one shard of changed tensors in memory at a time.

    ``dtype`` is that of dequantized tensors. ``advance`` is called with each tensor's number of
    values. Return the index, empty for a single file.
    """
    shards = list(_shards(targets, 4 if dtype == "float32" else 2))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = (
            "model.safetensors"
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        _write_shard(shard, folder / file, dtype, advance)
        weight_map |= {target.name: file for target in shard}
    return {"metadata": {}, "weight_map": weight_map} if len(shards) > 1 else {}


def _write_shard(
    shard: list[Target], path: Path, dtype: str, advance: Callable[[int], None]
) -> None:
    specs, arrays = {}, []
    for target in shard:
        kind, array = target.encoded(dtype)
        arrays.append(array)  # a spec holds only an address
        specs[target.name] = TensorSpec(
            dtype=kind,
            shape=array.shape if target.packed else target.tensor.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        advance(target.tensor.size)
    serialize_file(specs, path, metadata={"format": "pt"})
    path.chmod(0o644)  # a pod may run as another user


def _shards(targets: list[Target], value_bytes: int) -> Iterator[list[Target]]:
    shard: list[Target] = []
    held = 0
    for target in targets:
        kept = target.packed or target.tensor.kind in PLAIN_TYPES
        size = target.tensor.data.nbytes if kept else target.tensor.size * value_bytes
        if shard and held + size > SHARD_BYTES:
            yield shard
            shard, held = [], 0
        shard.append(target)
        held += size
    yield shard


def _encoded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[Any]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)  # numpy has no bfloat16: round half to even
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def _offset(name: str, model_type: str) -> float:
    return gemma.NORM_OFFSET if model_type == _GEMMA_TYPE and name.endswith("norm.weight") else 0.0


def _row_order(name: str, config: Mapping[str, Any]) -> npt.NDArray[np.intp] | None:
    found = _ROTARY.fullmatch(name)
    if found is None or config["model_type"] not in ("llama", "mistral"):
        return None
    key = "num_attention_heads" if found["which"] == "q" else "num_key_value_heads"
    return rotary_order(int(config[key]), int(config["head_dim"]))


def rotary_order(heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Return, for each row in transformers' order, the row in llama.cpp's: [heads · head_dim].

    llama.cpp has (head, pair, half), transformers (head, half, pair).
    """
    rows = np.arange(heads * head_dim, dtype=np.intp).reshape(heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).reshape(-1)
