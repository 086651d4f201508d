"""Forms of a linear layer's weights, and which layer has which.

Schemes are tagged structs, as a config with any of them is sent to ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

FP8_BLOCK = (128, 128)
"""Outputs and inputs that share a scale."""


class Granularity(Enum):
    """Weights that share a scale."""

    BLOCK = auto()
    CHANNEL = auto()
    TENSOR = auto()


class Packing(Enum):
    """Tool whose tensors hold codes of groups."""

    AWQ = auto()
    GPTQ = auto()
    """Stored zero points are one less than the real ones."""
    GPTQ_V2 = auto()
    COMPRESSED = auto()
    """compressed-tensors."""


class Fp4Kind(Enum):
    """Scales of e2m1 numbers."""

    MX = auto()
    """A power of two for 32 numbers."""
    STACKED = auto()
    """The same, in gpt-oss's tensors of all experts."""
    NV = auto()
    """An e4m3 number for 16 numbers, divided by a scale of the tensor."""
    NV_MODELOPT = auto()
    """The same, times a scale of the tensor, under ModelOpt's names."""


class Fp8Scheme(msgspec.Struct, frozen=True, tag=True):
    """e4m3 numbers with a scale. Activations keep their type, or are rounded by row and block."""

    granularity: Granularity
    at_load: bool = False
    """Whether the checkpoint's weights are plain and rounded when they are loaded."""

    @property
    def units(self) -> tuple[int, int]:
        """Return the outputs and the inputs in whose multiples ranks cut a layer."""
        return FP8_BLOCK if self.granularity is Granularity.BLOCK else (1, 1)

    @property
    def weight_bytes(self) -> float:
        """Return the bytes of a weight with its share of scales, as they are multiplied."""
        return 1.0 + 4.0 / (FP8_BLOCK[0] * FP8_BLOCK[1])


class Int8Scheme(msgspec.Struct, frozen=True, tag=True):
    """int8 weights with a scale per output. Activations are rounded to int8 by row."""

    granularity: Granularity
    """CHANNEL or TENSOR, as stored."""

    @property
    def units(self) -> tuple[int, int]:
        """See ``Fp8Scheme.units``."""
        return 1, 1

    @property
    def weight_bytes(self) -> float:
        """See ``Fp8Scheme.weight_bytes``."""
        return 1.0


class GroupedScheme(msgspec.Struct, frozen=True, tag=True):
    """Unsigned codes with a scale, and maybe a zero point, per output and group of inputs."""

    bits: int
    """4 or 8."""
    group: int | None
    """Inputs of a group; None is all inputs of a layer."""
    symmetric: bool
    act_order: bool
    """Whether the inputs of a group may be any, by a tensor of the layer."""
    packing: Packing

    @property
    def units(self) -> tuple[int, int]:
        """See ``Fp8Scheme.units``."""
        return 1, self.group or 1

    @property
    def weight_bytes(self) -> float:
        """See ``Fp8Scheme.weight_bytes``."""
        return self.bits / 8 + (0.0 if self.group is None else 4.0 / self.group)


class Fp4Scheme(msgspec.Struct, frozen=True, tag=True):
    """e2m1 numbers, two a byte, that are re-coded to e4m3 in blocks at load."""

    kind: Fp4Kind

    @property
    def units(self) -> tuple[int, int]:
        """See ``Fp8Scheme.units``. Stacked numbers are cut before they are in blocks."""
        return (1, 32) if self.kind is Fp4Kind.STACKED else FP8_BLOCK

    @property
    def weight_bytes(self) -> float:
        """See ``Fp8Scheme.weight_bytes``."""
        return 1.0 + 4.0 / (FP8_BLOCK[0] * FP8_BLOCK[1])


class GgufScheme(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a GGUF file, kept as they are."""

    kind: str
    """ggml's name, such as Q4_K."""
    values: int
    """Inputs of a block."""
    size: int
    """Bytes of a block."""

    @property
    def units(self) -> tuple[int, int]:
        """See ``Fp8Scheme.units``."""
        return 1, self.values

    @property
    def weight_bytes(self) -> float:
        """See ``Fp8Scheme.weight_bytes``."""
        return self.size / self.values


Scheme = Fp8Scheme | Int8Scheme | GroupedScheme | Fp4Scheme | GgufScheme


@dataclass(frozen=True, slots=True)
class Rule:
    """Scheme of all layers whose whole prefix matches a regular expression."""

    pattern: str
    scheme: Scheme | None
    """None is plain."""


@dataclass(frozen=True, slots=True)
class QuantFacts:
    """Form of a model's linear layers."""

    rules: tuple[Rule, ...] = ()
    """The first that matches decides; layers without one are plain."""
    at_load: bool = False
    """Whether all weights are plain and rounded to fp8 in blocks at load; there are no rules."""
    unapplied: tuple[str, ...] = ()
    """Ends of the names of scales of activations and KV, which are not applied."""

    def scheme(self, prefix: str) -> Scheme | None:
        """Return the form of the layer whose tensors begin with ``prefix``; None is plain."""
        if self.at_load:
            return Fp8Scheme(Granularity.BLOCK, at_load=True)
        for rule in self.rules:
            if re.fullmatch(rule.pattern, prefix):
                return rule.scheme
        return None

    @property
    def is_fp8(self) -> bool:
        """Return whether all layers that are not plain are of fp8."""
        return self.at_load or all(isinstance(each.scheme, Fp8Scheme | None) for each in self.rules)

    @property
    def weight_bytes(self) -> float | None:
        """Return the mean bytes of a weight over the schemes; None if they are plain."""
        if self.at_load:
            return Fp8Scheme(Granularity.BLOCK, at_load=True).weight_bytes
        found = [rule.scheme.weight_bytes for rule in self.rules if rule.scheme is not None]
        return sum(found) / len(found) if found else None

    @property
    def units(self) -> tuple[int, int]:
        """Return the outputs and the inputs in whose multiples ranks cut layers of any scheme."""
        if self.at_load:
            return FP8_BLOCK
        found = [rule.scheme.units for rule in self.rules if rule.scheme is not None]
        outputs, inputs = zip((1, 1), *found, strict=True)
        return max(outputs), max(inputs)


def within(name: str) -> str:
    """Return the pattern of the layers whose dotted prefix contains ``name``, in whole parts."""
    return rf"(.*\.)?{re.escape(name)}(\..*)?"
