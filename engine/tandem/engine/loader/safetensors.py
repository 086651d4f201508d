"""Tensors of safetensors files: one file, or shards with an index.

On a CPU they are views of the mapped file. To a GPU whole tensors are read past the mapping, by
several threads (``Uploader``).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.config.weight_files import INDEX
from tandem.engine.loader.errors import BadWeightsFile, MissingTensor
from tandem.engine.loader.files import TYPES, Place, places_in, weight_files
from tandem.engine.loader.progress import Progress
from tandem.engine.loader.shard import OUTPUTS, Shard
from tandem.engine.loader.upload import Uploader
from tandem.engine.loader.weights import TensorSpec, Weights, cut


class SafetensorsWeights(Weights):
    """The weight files of one folder. Files are opened at once, tensors mapped on request."""

    def __init__(
        self, folder: Path, *, dtype: torch.dtype, device: torch.device, progress: bool = True
    ) -> None:
        """Open the files. Raises WeightsNotFound or BadWeightsFile."""
        found = weight_files(folder)
        self._folder = folder
        self._open = {file: _open(file) for file in found.files}
        self._owners = found.owners if found.owners is not None else _owners(self._open)
        self._sorted = sorted(self._owners)
        self._places: dict[Path, dict[str, Place]] = {}
        self._uploader = Uploader(device) if device.type == "cuda" else None
        total = sum(file.stat().st_size for file in found.files)
        super().__init__(
            dtype=dtype,
            device=device,
            progress=Progress(source=str(folder), total=total, bar=progress),
        )

    def names(self) -> Collection[str]:
        """Return every tensor of the files, sorted."""
        return self._sorted

    def __contains__(self, name: str) -> bool:
        """Return whether a file holds the tensor."""
        return name in self._owners

    def close(self) -> None:
        """Close the files; tensors keep their own mapping."""
        self._open.clear()
        if self._uploader is not None:
            self._uploader.close()
        super().close()

    def _where(self, name: str) -> str:
        return str(self._owners[name])

    def spec(self, name: str) -> TensorSpec:
        """See Weights."""
        path = self._owners.get(name)
        if path is None:
            raise MissingTensor(self._explain_missing(name))
        assert self._open, "these weights are closed"
        try:
            view = self._open[path].get_slice(name)
        except SafetensorError as error:
            raise MissingTensor(f"{name} is not in {path}, where {INDEX} has it") from error
        return TensorSpec(view.get_dtype(), tuple(view.get_shape()))

    def _read(
        self, name: str, shape: tuple[int, ...] | None, shard: Shard, dtype: torch.dtype | None
    ) -> Tensor:
        path = self._owners[name]
        if self._uploader is not None:
            return self._upload(self._uploader, path, name, shard)
        tensor: Tensor = self._open[path].get_tensor(name)
        return cut(tensor, name, shard)

    def _upload(self, uploader: Uploader, path: Path, name: str, shard: Shard) -> Tensor:
        """Return the part in device memory: rows are read alone, columns with the whole tensor."""
        if path not in self._places:
            self._places[path] = places_in(path)
        place = self._places[path][name]
        shape, offset, dtype = place.shape, place.offset, TYPES[place.dtype]
        by_rows = shard.dim == OUTPUTS and shard.count > 1
        if by_rows:
            first = shard.span(name, shape[0]).start
            offset += first * math.prod(shape[1:]) * dtype.itemsize
            shape = shard.part_of(name, shape)
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        uploader.read(path, offset, tensor)
        return tensor if by_rows else cut(tensor, name, shard).contiguous()

    def _explain_missing(self, name: str) -> str:
        near = get_close_matches(name, self._sorted, n=3)
        hint = f"; near it are {', '.join(near)}" if near else ""
        return f"the model needs {name}, which no weight file of {self._folder} holds{hint}"


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise BadWeightsFile(f"{path} cannot be read: {error}") from error


def _owners(files: dict[Path, Any]) -> dict[str, Path]:
    owners: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in owners:
                raise BadWeightsFile(f"{name} is in {owners[name]} and in {path}")
            owners[name] = path
    return owners
