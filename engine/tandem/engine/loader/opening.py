"""Opens the weights of a config."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.config import EngineConfig
from tandem.engine.loader.errors import LoadError
from tandem.engine.loader.files import Progress
from tandem.engine.loader.safetensors import SafetensorsWeights
from tandem.engine.loader.weights import Shard, Weights, cut
from tandem.engine.ranks import ALONE, Ranks

PERIOD = 1_048_573
"""Numbers drawn per tensor; longer tensors repeat them. A prime, so that rows differ."""
_VECTOR_SPREAD = 0.02
SCALE = "weight_scale_inv"
"""End of the names of scales, which are near 1."""


class DummyWeights(Weights):
    """Weights with a tensor of every name; the shape must be given."""

    def __init__(
        self,
        seed: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        bar = Progress(source=f"dummy weights of seed {seed}", total=None, bar=progress)
        super().__init__(dtype=dtype, device=device, progress=bar, ranks=ranks)
        self._seed = seed

    def names(self) -> Collection[str]:
        return sorted(self._used)

    def __contains__(self, name: str) -> bool:
        """Return True: a model with an optional tensor gets it."""
        return True

    def _where(self, name: str) -> str:
        return "no file"

    def spec(self, name: str) -> None:
        """Return None: a dummy has the shape of the request."""

    def _read(
        self, name: str, shape: tuple[int, ...] | None, shard: Shard, dtype: torch.dtype | None
    ) -> Tensor:
        if shape is None:
            raise LoadError(f"a dummy for {name} needs its shape")
        scale, mean = _spread(name, shape)
        block = torch.rand(min(PERIOD, math.prod(shape)), generator=_generator(self._seed, name))
        block = block.sub_(0.5).mul_(scale * math.sqrt(12)).add_(mean)
        block = block.to(device=self.device, dtype=dtype or self.dtype)
        return cut(_repeat(block, math.prod(shape)).view(shape), name, shard)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _spread(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith(SCALE):
        return _VECTOR_SPREAD, 1.0
    if len(shape) > 1:
        return 1.0 / math.sqrt(shape[-1]), 0.0
    return _VECTOR_SPREAD, 1.0 if "norm" in name and name.endswith(".weight") else 0.0


def _repeat(block: Tensor, count: int) -> Tensor:
    out = torch.empty(count, dtype=block.dtype, device=block.device)
    whole = count // block.numel() * block.numel() if block.numel() else 0
    if whole:
        out[:whole].view(-1, block.numel()).copy_(block)
    out[whole:] = block[: count - whole]
    return out


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_weights(
    config: EngineConfig,
    *,
    device: torch.device | None = None,
    progress: bool = True,
    ranks: Ranks = ALONE,
) -> Weights:
    """Open the weights of ``config.model``, or dummies for load format ``dummy``.

    ``device`` is ``config.device`` unless a rank has its own. ``ranks`` is the rank that loads.
    Raises LoadError.
    """
    where = device if device is not None else torch.device(config.device)
    dtype = DTYPES[config.dtype]
    if config.model.load_format == "dummy":
        return DummyWeights(
            config.model.seed, dtype=dtype, device=where, progress=progress, ranks=ranks
        )
    folder = Path(config.model.model)
    return SafetensorsWeights(folder, dtype=dtype, device=where, progress=progress, ranks=ranks)
