"""CUDA graphs of whole steps, for classes of decodes, of rows with drafts, of prompts and of both.

A step is padded to the smallest class that holds it; larger ones run without a graph. Graphs avoid
that the device waits for the host's launches. All share one pool of memory; the largest is captured
first. A class runs once before its capture, so that its kernels are loaded.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.kv_memory import StepSize
from tandem.engine.sample import SamplingKind
from tandem.engine.sample.bounds import Bounds, BoundsStage
from tandem.engine.worker.inputs import StepInputs, StepStager
from tandem.engine.worker.staging import StepShape
from tandem.memory.streams import borrow_stream

logger = logging.getLogger(__name__)


class Captured(NamedTuple):
    """Graph and the result tensor of its replays."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        """Run the graph; the result is valid until the next replay."""
        self.graph.replay()
        return self.result


class Capturing:
    """Captures functions into one pool of memory: their graphs are never replayed at the same
    time."""

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
    """Fill ``graphs`` within the block, then log their number, time and memory, without that of
    first runs.

    Garbage is not collected: freeing a tensor of another stream breaks a capture.
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


CHUNKS = 8
_CHUNK_TOKENS = (16, 32, 64, 128, 192, *range(256, 2049, 128))
"""Tokens of chunks in a step without decodes: rows that products compute at a time."""
_MIXED_DECODES = (16, 64, 128)
_MIXED_TOKENS = tuple(range(128, 1153, 128))
"""Tokens of decodes and chunks, next to up to 128 decodes: rows that products compute at a time."""
_CROWDED = ((256, 64), (256, 128), (256, 256), (256, 512))
"""Decodes, and tokens of chunks next to them."""
_REPLAYED = ((16, 112), (64, 192), (256, 128))
"""Decodes, and tokens of chunks next to them that sample at several positions: resumed requests,
and prompts beside drafts."""
_DRAFTED = (1, 4, 8, 16, 32, 64)
"""Rows of a step with drafts."""
_WIDTHS = (2, 4, 8, 16)
"""Maximum tokens of each: the last one and its drafts."""
_DRAFTED_TOKENS = 512
"""Maximum tokens of all."""
_UNEQUAL = ((16, 32), (32, 64), (64, 128))
"""Rows, and their tokens if few of the rows have drafts."""

_PROMPTS = 32
"""Prompts in a class of an encoder's steps; a second class has as many as possible, each of which
costs an empty tile."""
_COARSE, _FINE = 4, 8
"""Sizes of an encoder's steps between two powers of two, below 2,048 tokens and from there on: at
most an eighth is padding."""
_FINE_FROM = 2048


def decode_sizes(most: int) -> list[int]:
    """Return the decodes of each class, in smaller distances for small batches."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, 513, 64)
    sizes += range(640, most, 128)
    return sorted({*(each for each in sizes if each < most), most})


def row_shapes(num_drafts: int) -> list[StepShape]:
    """Return the classes of rows with up to ``num_drafts`` drafts (at most 15) after their last
    token."""
    if not num_drafts:
        return []
    widths = [each for each in _WIDTHS if each < 2 * (num_drafts + 1)]
    sizes = [(min(r * width, _DRAFTED_TOKENS), r, width) for r in _DRAFTED for width in widths]
    sizes += [(tokens, rows, widths[-1]) for rows, tokens in _UNEQUAL]
    return [StepShape(0, *each, whole=True) for each in dict.fromkeys(sizes)]


def step_shapes(
    *, max_rows: int, max_tokens: int, max_captured: int, num_drafts: int = 0
) -> list[StepShape]:
    """Return every class up to these rows and tokens, none over ``max_captured``. ``num_drafts``:
    maximum drafts of a row, without those of resumed requests."""
    limit = min(max_tokens, max_captured)
    chunks = min(CHUNKS, max_rows)
    shapes = [StepShape(n, 0, 0) for n in decode_sizes(min(max_rows, limit))]
    shapes += [StepShape(0, n, chunks) for n in _CHUNK_TOKENS]
    shapes += [StepShape(d, n - d, chunks) for d in _MIXED_DECODES for n in _MIXED_TOKENS if n > d]
    shapes += [StepShape(d, n, chunks) for d, n in _CROWDED]
    shapes += [StepShape(d, n, chunks, whole=True) for d, n in _REPLAYED]
    shapes += row_shapes(num_drafts)
    return [each for each in shapes if each.tokens <= limit and _seats(each) <= max_rows]


def _seats(shape: StepShape) -> int:
    return shape.chunks if shape.width else max(shape.decodes, shape.chunks)


def encoder_shapes(*, max_rows: int, max_tokens: int, max_captured: int) -> list[StepShape]:
    """Return every class of an encoder's steps, with the same bounds."""
    limit = min(max_tokens, max_captured)
    sizes = {limit, *(size for size in (16, 32, 64, 128, 192) if size < limit)}
    start = 256
    while start < limit:
        apart = start // (_COARSE if start < _FINE_FROM else _FINE)
        sizes |= {size for size in range(start, 2 * start, apart) if size < limit}
        start *= 2
    shapes = {StepShape(0, n, min(most, max_rows, n)) for n in sizes for most in (_PROMPTS, n)}
    return sorted(shapes, key=_cost)


class StepGraphs:
    """Captured classes of steps; none before ``capture``."""

    def __init__(self) -> None:
        self._graphs: dict[StepShape, Captured] = {}
        self.capturing: Capturing | None = None
        self._decodes: list[StepShape] = []
        self._others: list[StepShape] = []

    def __len__(self) -> int:
        return len(self._graphs)

    def offer(self, shapes: list[StepShape]) -> None:
        self._decodes = sorted((each for each in shapes if not each.chunks), key=_cost)
        self._others = sorted((each for each in shapes if each.chunks), key=_cost)

    def fit(self, own: StepShape, *, whole: bool = False) -> StepShape | None:
        """Return the smallest class that holds a step of shape ``own``. ``whole``: states of other
        tokens than the last of each row are required."""
        if not own.chunks:
            return next((each for each in self._decodes if each.decodes >= own.decodes), None)
        found = (each for each in self._others if each.whole or not whole)
        return next((each for each in found if _holds(each, own)), None)

    def replay(self, shape: StepShape) -> Tensor:
        """Run the class on the staged inputs; return hidden states [rows of the class, hidden],
        valid until its next replay."""
        return self._graphs[shape].replay()

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        """Return the sizes of all classes but those of rows with drafts."""
        shapes = (*self._decodes, *self._others)
        return tuple(StepSize(*each[:3]) for each in shapes if not each.width)

    def decodes(self) -> Iterator[tuple[StepShape, Tensor]]:
        """Yield the classes without chunks, the largest first, with their results."""
        for shape in reversed(self._decodes):
            yield shape, self._graphs[shape].result

    def capture(
        self,
        shapes: list[StepShape],
        stager: StepStager,
        run: Callable[[StepInputs], Tensor],
    ) -> None:
        """Capture ``run`` at each of ``shapes``. Called once, before any step."""
        self.capturing = Capturing(stager.device)
        with captures("steps", self._graphs, stager.device):
            for shape in sorted(shapes, key=lambda each: -each.tokens):
                inputs = stager.stage_nothing(shape)
                self._graphs[shape] = self.capturing.capture(partial(run, inputs))
        self.offer(shapes)


def _holds(shape: StepShape, own: StepShape) -> bool:
    if shape.width:
        held = own.rows <= shape.chunks and own.tokens <= shape.chunk_tokens
        return held and own.width <= shape.width
    return (
        own.decodes <= shape.decodes
        and own.chunk_tokens <= shape.chunk_tokens
        and own.chunks <= shape.chunks
    )


def _cost(shape: StepShape) -> tuple[int, bool, int, int]:
    return shape.tokens, shape.whole, shape.width, shape.chunks


Choose = Callable[[StepShape, SamplingKind, Tensor, Bounds | None], Tensor]
"""Function that samples tokens [decodes] from a class's hidden states, within bounds if given."""


class SamplerGraphs:
    """Captured choices; none before ``capture``."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[StepShape, SamplingKind, bool], Captured] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def has(self, shape: StepShape) -> bool:
        return (shape, SamplingKind.GREEDY, False) in self._graphs

    def replay(self, shape: StepShape, kind: SamplingKind, *, bounded: bool) -> Tensor:
        """Sample after the step's replay; return int64 [decodes], valid until the next replay of
        the same. Parameters and bounds are read at fixed addresses."""
        return self._graphs[shape, kind, bounded].replay()

    def capture(
        self, steps: StepGraphs, stager: StepStager, choose: Choose, bounds: BoundsStage
    ) -> None:
        """Capture ``choose`` for each class of decodes of ``steps``, in shared memory. Called once,
        before any step."""
        assert steps.capturing is not None, "steps are captured before their choices"
        with captures("choices", self._graphs, stager.device):
            for shape, hidden in steps.decodes():
                stager.stage_nothing(shape)
                for kind in reversed(SamplingKind):
                    for within in (bounds.all_of(shape.decodes), None):
                        run = partial(choose, shape, kind, hidden, within)
                        captured = steps.capturing.capture(run)
                        self._graphs[shape, kind, within is not None] = captured
