"""Tensors of safetensors files: one file, or shards with an index.

On a CPU they are views of the mapped file. For a GPU several threads read whole tensors
(``Uploader``).
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.engine.config.weight_files import INDEX
from tandem.engine.loader.errors import LoadError
from tandem.engine.loader.files import (
    TYPES,
    Place,
    Progress,
    places_in,
    weight_files,
)
from tandem.engine.loader.weights import (
    OUTPUTS,
    Shard,
    TensorSpec,
    Weights,
    cut,
)
from tandem.engine.ranks import ALONE, Ranks
from tandem.memory.streams import borrow_stream

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
MOST_THREADS = 8
READ_SECONDS = 600.0
"""Time after which the read of a tensor hangs."""
CLOSE_SECONDS = 5.0
"""Seconds that the threads' work in progress may take after ``close``."""

_Job = tuple[Future[int], "partial[int]"]


class Uploader:
    """Reads ranges of files into device tensors. ``close`` frees threads and buffers."""

    def __init__(self, device: torch.device, *, threads: int | None = None) -> None:
        """The default of ``threads`` is the number of cores, up to ``MOST_THREADS``."""
        count = min(MOST_THREADS, os.cpu_count() or 1) if threads is None else threads
        self._device = device
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        """None ends one thread."""
        self._threads = [
            threading.Thread(target=self._work, name=f"load-weights-{each}", daemon=True)
            for each in range(count)
        ]
        for each in self._threads:
            each.start()
        self._own = threading.local()
        self._files: dict[Path, int] = {}

    def read(self, path: Path, offset: int, into: Tensor) -> None:
        """Fill contiguous ``into`` with the bytes of ``path`` from ``offset`` on. Raises
        LoadError for a file that ends early, TimeoutError."""
        flat = into.view(-1).view(torch.uint8)
        file = self._open(path)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # earlier users of the memory
        jobs = [
            self._queued(partial(self._piece, file, offset + at, flat[at : at + PIECE_BYTES]))
            for at in range(0, flat.numel(), PIECE_BYTES)
        ]
        done = wait(jobs, READ_SECONDS)
        if done.not_done:
            raise TimeoutError(f"{path} did not give {flat.numel()} bytes within {READ_SECONDS} s")
        for each in jobs:
            missing = each.result()
            if missing:
                raise LoadError(f"{path} ends {missing} bytes before one of its tensors does")

    def close(self) -> None:
        """Release files, threads and buffers. May be called twice. A hung thread and the files are
        abandoned."""
        while not self._jobs.empty():  # jobs that no thread has begun
            with suppress(queue.Empty):
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for each in self._threads:
            each.join(max(0.0, deadline - time.monotonic()))
        hang = sum(each.is_alive() for each in self._threads)
        self._threads.clear()
        if hang:
            logger.warning("%d threads that read weights hang, and are abandoned", hang)
            self._files.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    def _queued(self, run: partial[int]) -> Future[int]:
        future: Future[int] = Future()
        self._jobs.put((future, run))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, run = job
            try:
                future.set_result(run())
            except Exception as error:
                future.set_exception(error)

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]

    def _piece(self, file: int, offset: int, into: Tensor) -> int:
        """Copy one piece; return the number of its bytes that the file lacks."""
        buffer = self._buffer()
        size = into.numel()
        at = 0
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]
        while at < size:
            got = os.preadv(file, [view[at:size]], offset + at)
            if got == 0:
                return size - at
            at += got
        if self._device.type != "cuda":
            into.copy_(buffer[:size])
            return 0
        stream = self._stream()
        with torch.cuda.stream(stream):
            into.copy_(buffer[:size], non_blocking=True)
        stream.synchronize()
        return 0

    def _buffer(self) -> Tensor:
        if not hasattr(self._own, "buffer"):
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
            self._own.buffer = buffer.pin_memory() if self._device.type == "cuda" else buffer
        owned: Tensor = self._own.buffer
        return owned

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._own, "stream"):
            # Owned by the thread: a hung one keeps its stream.
            self._own.stream = borrow_stream(threading.current_thread(), self._device)
        owned: torch.cuda.Stream = self._own.stream
        return owned


class SafetensorsWeights(Weights):
    """Weight files of one folder. Files are opened at once, tensors mapped on request."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        progress: bool = True,
        ranks: Ranks = ALONE,
    ) -> None:
        """Open the files. Raises LoadError."""
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
            ranks=ranks,
        )

    def names(self) -> Collection[str]:
        return self._sorted

    def __contains__(self, name: str) -> bool:
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
        path = self._owners.get(name)
        if path is None:
            raise LoadError(self._explain_missing(name))
        assert self._open, "these weights are closed"
        try:
            view = self._open[path].get_slice(name)
        except SafetensorError as error:
            raise LoadError(f"{name} is not in {path}, where {INDEX} has it") from error
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
        raise LoadError(f"{path} cannot be read: {error}") from error


def _owners(files: dict[Path, Any]) -> dict[str, Path]:
    owners: dict[str, Path] = {}
    for path, file in files.items():
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in owners:
                raise LoadError(f"{name} is in {owners[name]} and in {path}")
            owners[name] = path
    return owners
