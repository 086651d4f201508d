"""Copy from files in the page cache to device memory, by several threads through pinned buffers.

One thread copies from the page cache at a fraction of the bus's rate, and a copy from memory that
is not pinned goes through the driver's own small buffer. So a tensor is cut into pieces. Each
thread reads a piece into pinned memory of its own (``preadv``, no page faults) and queues its copy
on a stream of its own, one piece ahead of the bus. A thread may hang with its disk: no join exceeds
a deadline, and no thread keeps the process alive.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tandem.engine.loader.errors import BadWeightsFile
from tandem.kernels.memory.streams import borrow_stream

logger = logging.getLogger(__name__)

PIECE_BYTES = 8 << 20
MOST_THREADS = 8
READ_SECONDS = 600.0
"""A tensor that takes longer to read is on a disk that hangs."""
CLOSE_SECONDS = 5.0
"""Seconds that the threads' work in progress may take after ``close``."""

_Job = tuple[Future[int], "partial[int]"]


class Uploader:
    """Reads ranges of files into device tensors. ``close`` frees threads and buffers."""

    def __init__(self, device: torch.device, *, threads: int | None = None) -> None:
        """``threads`` is by default as many as there are cores, up to ``MOST_THREADS``."""
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
        """Fill contiguous ``into`` with the bytes of ``path`` from ``offset`` on; there when this
        returns. Raises BadWeightsFile for a file that ends early, TimeoutError."""
        flat = into.view(-1).view(torch.uint8)
        file = self._open(path)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # who used the memory before
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
                raise BadWeightsFile(f"{path} ends {missing} bytes before one of its tensors does")

    def close(self) -> None:
        """Release files, threads and buffers. May be called twice. A thread that hangs is
        abandoned, with the files, one of which it may be reading."""
        while not self._jobs.empty():  # nobody else takes what threads have not begun
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
            logger.warning("%d threads that read weights hang, and are left behind", hang)
            self._files.clear()
        while self._files:
            os.close(self._files.popitem()[1])

    def _queued(self, run: partial[int]) -> Future[int]:
        future: Future[int] = Future()
        self._jobs.put((future, run))
        return future

    def _work(self) -> None:
        """Run one thread."""
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
            # While the thread lives: one that hangs leaves its stream to nobody.
            self._own.stream = borrow_stream(threading.current_thread(), self._device)
        owned: torch.cuda.Stream = self._own.stream
        return owned
