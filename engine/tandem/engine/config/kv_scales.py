"""Scales of a checkpoint for KV that is held as float8 codes; only headers and scales are read.

A layer has ``self_attn.k_scale`` and ``v_scale``, or those of the projections' outputs
(``self_attn.k_proj.output_scale``): one number, or one of each KV head. vLLM reads the same names.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from tandem.engine.config.weight_files import Stored, tensors_like
from tandem.protocol.errors import InvalidParameter

NAMES = re.compile(
    r"(?:model\.)?layers\.(\d+)\.self_attn\.(?:([kv])_proj\.output_scale|([kv])_scale)"
)
"""Names of the tensors; a layer's own scale is preferred to that of a projection."""
IGNORED = ("*.self_attn.[kv]_scale", "*.self_attn.[kv]_proj.output_scale")
"""The same names as patterns, for a loader of weights."""
_FORMATS = {"F64": "d", "F32": "f", "F16": "e"}


class LayerScales(NamedTuple):
    """Factors of one layer's codes, one of each KV head."""

    k: tuple[float, ...]
    v: tuple[float, ...]


KVScales = Mapping[int, LayerScales]
"""Scales by layer; a layer without them has factors of 1."""


def read_kv_scales(folder: Path, num_kv_heads: int) -> KVScales:
    """Return the scales of the weights in a folder; {} if they have none, or no file is readable.

    Raises InvalidParameter for a scale that is not a positive number, or not one of each head.
    """
    found: dict[tuple[int, str], tuple[float, ...]] = {}
    tensors = tensors_like(folder, NAMES)
    for name in sorted(tensors):  # a layer's own scale comes after that of its projection
        layer, of_output, own = NAMES.fullmatch(name).groups()  # type: ignore[union-attr]
        found[int(layer), of_output or own] = _read(name, tensors[name], num_kv_heads)
    ones = (1.0,) * num_kv_heads
    return {
        layer: LayerScales(found.get((layer, "k"), ones), found.get((layer, "v"), ones))
        for layer in sorted({layer for layer, _ in found})
    }


def _read(name: str, at: Stored, heads: int) -> tuple[float, ...]:
    with at.path.open("rb") as file:
        file.seek(at.start)
        data = file.read(at.size)
    if at.dtype == "BF16":
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
    elif at.dtype not in _FORMATS:
        allowed = f"BF16, {', '.join(_FORMATS)}"
        raise InvalidParameter("model", f"{name} of type {at.dtype}", f"scales of type {allowed}")
    kind = _FORMATS.get(at.dtype, "f")
    count = len(data) // struct.calcsize(kind)
    values = struct.unpack_from(f"<{count}{kind}", data)
    if len(values) not in (1, heads) or math.prod(at.shape) != len(values):
        allowed = f"one number, or one of each of {heads} KV heads"
        raise InvalidParameter("model", f"{name} of shape {list(at.shape)}", allowed)
    for value in values:
        if not 0 < value < math.inf:
            raise InvalidParameter("model", f"{name}: {value}", "scales above 0")
    return values * (heads if len(values) == 1 else 1)


def digest_of(scales: KVScales) -> str:
    """Return 16 hex digits of the scales; "" without any."""
    if not scales:
        return ""
    digest = blake2b(digest_size=8, person=b"tandem-kvscale")
    for layer, each in sorted(scales.items()):
        numbers = (*each.k, *each.v)
        digest.update(struct.pack(f"<q{len(numbers)}f", layer, *numbers))
    return digest.hexdigest()


def rows_of(scales: KVScales, layers: Sequence[int], heads: range) -> tuple[tuple[float, ...], ...]:
    """Return the factors of K and then of V of each layer, those of the KV heads ``heads``."""
    ones = (1.0,) * heads.stop
    return tuple(
        part[heads.start : heads.stop]
        for layer in layers
        for part in scales.get(layer, LayerScales(ones, ones))
    )
