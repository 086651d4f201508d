"""Frames of one engine step's outputs for one router, within the link's size bound.

A frame beyond the bound closes the connection, and the router loses the worker with all its
requests. Outputs that are too large together (vectors of all tokens, log-probabilities of prompts)
are sent one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.protocol.messages import Frame
from tandem.protocol.outputs import BlockEvents, EngineOutput, Failed, frame_bytes
from tandem.protocol.timeline import LegTimes

FRAME_BYTES = 16 << 20
"""Bytes of outputs in one frame; a larger output goes alone. Far below MAX_FRAME_BYTES, so that
other messages to the router are not delayed by it."""
FRAME_BLOCKS = 1 << 14
"""Block hashes in one frame: 295 kB, which a router's loop reads in some milliseconds. Its streams
get their turns between two frames."""


def step_frames(
    step: int,
    outputs: tuple[EngineOutput, ...],
    failed: tuple[Failed, ...],
    times: tuple[LegTimes, ...],
) -> Iterator[Frame]:
    """Yield the frames of a step, mostly one. ``times`` go with the first one, as nothing is read
    after a request's last output. ``failed`` goes with the last one, after the outputs before the
    failure."""
    *before, last = _parts(outputs, FRAME_BYTES)
    for part in before:
        yield Frame(step=step, outputs=part, times=times)
        times = ()
    yield Frame(step=step, outputs=last, failed=failed, times=times)


def block_frames(step: int, events: BlockEvents | None) -> Iterator[Frame]:
    """Yield the frames of block events, mostly one; none without events. Clearing a cache at once
    gives as many events as the cache had blocks."""
    if events is None:
        return
    stored, removed = events.stored, events.removed
    for begin in range(0, max(1, len(stored), len(removed)), FRAME_BLOCKS):
        end = begin + FRAME_BLOCKS
        cleared = events.cleared and not begin
        part = BlockEvents(stored[begin:end], removed[begin:end], cleared)
        yield Frame(step=step, blocks=part)


def _parts(outputs: Sequence[EngineOutput], limit: int) -> Iterator[tuple[EngineOutput, ...]]:
    """Yield the outputs in order, cut by their bytes; at least one part, which may be empty."""
    begin = size = 0
    for at, output in enumerate(outputs):
        more = frame_bytes(output)
        if size and size + more > limit:
            yield tuple(outputs[begin:at])
            begin, size = at, 0
        size += more
    yield tuple(outputs[begin:])
