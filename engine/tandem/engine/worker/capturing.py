"""Capturing of CUDA graphs, shared by graphs of steps and of choices."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.memory.streams import borrow_stream

logger = logging.getLogger(__name__)


class Captured(NamedTuple):
    """A graph and the result tensor of its replays."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        """Run the graph; the result is valid until the next replay."""
        self.graph.replay()
        return self.result


class Capturing:
    """Captures functions one after another into one pool of memory: graphs of one pool are never
    replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._device = device
        self._stream = borrow_stream(self, device)

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """Run it once, so that its kernels are loaded, then capture it."""
        run()
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        return Captured(graph, result)


@contextmanager
def captures(what: str, graphs: Sized, device: torch.device) -> Iterator[None]:
    """Fill ``graphs`` within the block, then log their number, time and memory. The memory of each
    first run is not counted, as torch would keep it for later.

    No garbage is collected meanwhile: freeing a tensor of another stream breaks a capture.
    """
    started = time.monotonic()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    torch.cuda.empty_cache()
    used = (before - torch.cuda.mem_get_info(device)[0]) / 2**30
    elapsed = time.monotonic() - started
    logger.info("CUDA graphs of %s: %d in %.1f s, %.2f GiB", what, len(graphs), elapsed, used)
