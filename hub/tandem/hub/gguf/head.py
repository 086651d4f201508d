"""Size of the head of a GGUF file: its keys and descriptions of tensors.

The ``gguf`` package takes seconds for a vocabulary; here values are skipped.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tandem.hub.errors import UnsupportedModel
from tandem.hub.gguf import gemma
from tandem.hub.gguf.reader import (
    MAX_KEYS,
    EndOfFile,
    Kind,
    Malformed,
    Values,
)

START_BYTES = 1 << 20
"""Bytes that include the keys before a vocabulary."""
_TOKENS = "tokenizer.ggml.tokens"


def read_keys(start: bytes) -> dict[str, Any]:
    """Return the keys with one value in ``start``, and the length of the vocabulary."""
    found: dict[str, Any] = {}
    try:
        values = Values(memoryview(start))
        values.number("Q")  # tensors
        for _ in range(values.count("keys", MAX_KEYS)):
            key, kind = values.text("a key"), values.number("I")
            if kind == Kind.ARRAY:
                inner, count = values.list_head(key)
                if key == _TOKENS:
                    found[key] = count
                values.skip_list(inner, count, key)
            else:
                found[key] = values.value(kind, key)
    except (EndOfFile, Malformed):
        pass  # the converter reports the fault
    return found


def sketch(start: bytes, name: str, families: dict[str, str]) -> dict[str, Any] | None:
    """Return the known part of config.json, or None if too little is known.

    ``families`` can be converted. Raises UnsupportedModel for others.
    """
    keys = read_keys(start)
    family = keys.get("general.architecture")
    if family is None:
        return None
    if family not in families:
        raise UnsupportedModel(
            f"model: {name} has architecture {family!r}; GGUF can be converted for "
            f"{sorted(families)}"
        )
    if keys.get(f"{family}.expert_count"):
        raise UnsupportedModel(
            f"model: {name} is a mixture of experts ({family}.expert_count is "
            f"{keys[f'{family}.expert_count']}), which cannot be computed yet; give a dense model"
        )
    parts = keys.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModel(
            f"model: {name} is one of {parts} parts; merge them first (llama-gguf-split --merge)"
        )
    try:
        return _config(keys, family, families[family])
    except (KeyError, TypeError, ZeroDivisionError):
        return None  # the converter reports the fault


def _config(keys: dict[str, Any], family: str, architecture: str) -> dict[str, Any]:
    def own(key: str, *default: Any) -> Any:
        return keys.get(f"{family}.{key}", *default) if default else keys[f"{family}.{key}"]

    heads = own("attention.head_count")
    rope: dict[str, Any] = {"rope_theta": own("rope.freq_base", 10000.0), "rope_type": "default"}
    if (kind := own("rope.scaling.type", "none")) in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": own("rope.scaling.factor")}
        if original := own("rope.scaling.original_context_length", None):
            rope["original_max_position_embeddings"] = original
    config = {
        "architectures": [architecture],
        "vocab_size": keys.get(_TOKENS) or own("vocab_size"),
        "hidden_size": own("embedding_length"),
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own("attention.head_count_kv", heads),
        "head_dim": own("attention.key_length", own("embedding_length") // heads),
        "max_position_embeddings": own("context_length"),
        "rope_parameters": rope,
    }
    if family != gemma.FAMILY:
        return config
    return config | gemma.gemma3_keys(
        window=own(gemma.WINDOW),
        pattern=own(gemma.PATTERN, gemma.DEFAULT_PATTERN),
        local_base=own(gemma.LOCAL_BASE, gemma.DEFAULT_LOCAL_BASE),
        rope=rope,
    )


_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_MAX_COUNT = 4_000_000
"""Maximum number of keys, tensors, or values of a list."""
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by type, if constant."""
_AFTER_DIMS = 4 + 8


def head_bytes(path: Path) -> int:
    """Return the bytes before the tensors' values, without padding. Raises OSError.

    Returns 0 for a file that is incomplete or has unknown types.
    """
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                end = _Walk(content).end()
            except (struct.error, KeyError, OverflowError):
                return 0
            return end if end <= len(content) else 0


class _Walk:
    """Walk over the head of a file.

    Raises struct.error at its end, KeyError for an unknown type, OverflowError for excessive sizes.
    """

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MAGIC)
        self._left = _MAX_COUNT
        (version,) = struct.unpack_from("<I", content, self._at)
        self._at += 4
        order = "<" if version & 0xFFFF else ">"  # versions are small numbers
        self._u32, self._u64 = struct.Struct(f"{order}I"), struct.Struct(f"{order}Q")

    def end(self) -> int:
        tensors, keys = self._number(self._u64), self._number(self._u64)
        self._left -= tensors + keys
        if self._left < 0:
            raise OverflowError
        for _ in range(keys):
            self._strings(1)
            self._values(self._number(self._u32), 1)
        for _ in range(tensors):
            self._strings(1)
            dims = self._number(self._u32)
            self._at += 8 * dims + _AFTER_DIMS
        return self._at

    def _number(self, kind: struct.Struct) -> int:
        number: int = kind.unpack_from(self._content, self._at)[0]
        self._at += kind.size
        return number

    def _values(self, kind: int, count: int) -> None:
        if kind == _STRING:
            self._strings(count)
        elif kind == _ARRAY:
            inner, size = self._number(self._u32), self._number(self._u64)
            self._left -= size
            if inner == _ARRAY or self._left < 0:
                raise OverflowError
            self._values(inner, size)
        else:
            self._at += _SIZES[kind] * count

    def _strings(self, count: int) -> None:
        content, length_at, at = self._content, self._u64.unpack_from, self._at
        for _ in range(count):
            at += 8 + length_at(content, at)[0]
        self._at = at
