"""Angles of rotary position embedding of heads or of their first part, with transformers'
scalings.

Default, linear (Chen et al. 2023), dynamic NTK, yarn (Peng et al. 2023) and llama3. A step computes
the angles of its positions once; a GPU reads them from a table.

Dynamic NTK depends on the sequence's length. A token at position p has the frequencies of length p
+ 1, so that chunks do not change its key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.engine.config import ModelFacts, RopeFacts
from tandem.kernels.rotary_kv import Rotation
from tandem.protocol.errors import InvalidParameter


class Rotary:
    """Angles for one model on one device."""

    def __init__(self, facts: ModelFacts, *, dtype: torch.dtype, device: torch.device) -> None:
        """``dtype`` is that of q and k; angles are computed in float32."""
        rope = facts.rope
        if rope.kind not in _SCALINGS:
            allowed = f"one of {', '.join(_SCALINGS)}"
            raise InvalidParameter("config.json: rope_parameters.rope_type", rope.kind, allowed)
        inverse, factor = _SCALINGS[rope.kind](facts)
        self._inverse = inverse.to(device)
        self._factor = factor
        self._unrotated = (facts.head_dim - rotated_dim(facts)) // 2
        self._dynamic = _Dynamic(facts, device) if rope.kind == "dynamic" else None
        self._dtype = dtype
        self._table: Tensor | None = None
        """[positions, 2 * head_dim]: cos, then sin."""

    def tabulate(self, length: int) -> None:
        """Keep the angles of positions 0 to ``length`` - 1; later ones must not be requested
        then."""
        positions = torch.arange(length, device=self._inverse.device)
        self._table = torch.cat(self._angles(positions), -1)

    def __call__(self, positions: Tensor) -> Rotation:
        """Return cos and signed sin of int64 ``positions`` [tokens], each [tokens, head_dim].

        Each half of a head has its rotated numbers first (``rotary_order``); others are kept as
        they are, by cos 1 and sin 0.
        """
        if self._table is None:
            return self._angles(positions)
        found = self._table.index_select(0, positions)
        return Rotation(*found.tensor_split(2, 1))

    def _angles(self, positions: Tensor) -> Rotation:
        at = positions.to(torch.float32).unsqueeze(1)
        angles = at * (self._inverse if self._dynamic is None else self._dynamic.inverse(at))
        cos, sin = angles.cos().mul_(self._factor), angles.sin().mul_(self._factor)
        if self._unrotated:
            cos, sin = pad(cos, (0, self._unrotated), value=1.0), pad(sin, (0, self._unrotated))
        return Rotation(
            cos=torch.cat((cos, cos), -1).to(self._dtype),
            sin=torch.cat((-sin, sin), -1).to(self._dtype),
        )


def rotated_dim(facts: ModelFacts) -> int:
    """Return how many numbers of a head are rotated, the first ones."""
    return int(facts.head_dim * facts.rope.partial)


def rotary_order(facts: ModelFacts) -> Tensor:
    """Return int64 [head_dim]: the checkpoint's number at each place of a head in memory.

    The op rotates number i with i + head_dim / 2, the checkpoint's layers i with i + rotated / 2. Q
    and k are kept in one order, which leaves their products as they are.
    """
    dim, half = facts.head_dim, rotated_dim(facts) // 2
    middle = dim // 2 + half
    ranges = ((0, half), (2 * half, middle), (half, 2 * half), (middle, dim))
    return torch.cat([torch.arange(*each) for each in ranges])


class _Dynamic:
    """Frequencies by position: plain up to the trained length, stretched beyond."""

    def __init__(self, facts: ModelFacts, device: torch.device) -> None:
        dim = rotated_dim(facts)
        self._base = facts.rope.theta
        self._trained = facts.max_position_embeddings
        self._stretch = float(_number(facts.rope, "factor"))
        self._power = dim / (dim - 2)
        self._exponents = (torch.arange(0, dim, 2).float() / dim).to(device)

    def inverse(self, at: Tensor) -> Tensor:
        """Return [tokens, dim / 2] for positions [tokens, 1]."""
        length = (at + 1).clamp(min=self._trained)
        growth = self._stretch * length / self._trained - (self._stretch - 1)
        return 1.0 / (self._base * growth**self._power) ** self._exponents


def _plain(facts: ModelFacts) -> Tensor:
    dim = rotated_dim(facts)
    exponents = torch.arange(0, dim, 2).float() / dim
    return 1.0 / facts.rope.theta**exponents


def _default(facts: ModelFacts) -> tuple[Tensor, float]:
    return _plain(facts), 1.0


def _linear(facts: ModelFacts) -> tuple[Tensor, float]:
    return _plain(facts) / _number(facts.rope, "factor"), 1.0


def _llama3(facts: ModelFacts) -> tuple[Tensor, float]:
    rope = facts.rope
    factor = _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    trained = _number(rope, "original_max_position_embeddings")
    plain = _plain(facts)
    wavelength = 2 * math.pi / plain
    keep = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain, 1.0


def _yarn(facts: ModelFacts) -> tuple[Tensor, float]:
    rope, dim = facts.rope, rotated_dim(facts)
    trained = _number(rope, "original_max_position_embeddings", facts.max_position_embeddings)
    factor = _number(rope, "factor", facts.max_position_embeddings / trained)

    def dimension_of(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_of(_number(rope, "beta_fast", 32))
    last = dimension_of(_number(rope, "beta_slow", 1))
    if rope.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    stretched = ((torch.arange(dim // 2).float() - first) / (last - first)).clamp(0, 1)
    plain = _plain(facts)
    inverse = plain / factor * stretched + plain * (1 - stretched)
    return inverse, _yarn_factor(rope.scaling, factor)


def _yarn_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def growth(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return growth(float(over)) / growth(float(under)) if over and under else growth(1.0)


def _number(rope: RopeFacts, name: str, default: float | None = None) -> float:
    value = rope.scaling.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise InvalidParameter(
            f"config.json: rope_parameters.{name}", value, f"a number above 0 for {rope.kind}"
        )
    return float(value)


_SCALINGS: dict[str, Callable[[ModelFacts], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
