"""What one engine step has to say to one router, as frames that its socket takes.

A frame beyond the link's bound closes the connection, and the router loses the worker with all
that runs there: answers that together are so large (vectors of all tokens, log-probabilities of
prompts) go one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tandem.protocol.messages import Frame
from tandem.protocol.outputs import BlockEvents, EngineOutput, Failed, frame_bytes
from tandem.protocol.timeline import LegTimes

FRAME_BYTES = 16 << 20
"""Of outputs in one frame; one that is larger by itself goes alone. Far below MAX_FRAME_BYTES, so
that what else the router waits for is not held up behind it."""
FRAME_BLOCKS = 1 << 14
"""Block hashes in one frame: 295 kB, which a router's loop reads in some milliseconds; its streams
get their turns between two of them."""


def step_frames(
    step: int,
    outputs: tuple[EngineOutput, ...],
    failed: tuple[Failed, ...],
    times: tuple[LegTimes, ...],
) -> Iterator[Frame]:
    """One frame, mostly. ``times`` go with the first one, as nobody listens behind a request's last
    words, and ``failed`` with the last one, behind what came before the failure."""
    *before, last = _parts(outputs, FRAME_BYTES)
    for part in before:
        yield Frame(step=step, outputs=part, times=times)
        times = ()
    yield Frame(step=step, outputs=last, failed=failed, times=times)


def block_frames(step: int, events: BlockEvents | None) -> Iterator[Frame]:
    """One frame, mostly; none without events. A cache that is emptied at once is as long as it
    was."""
    if events is None:
        return
    stored, removed = events.stored, events.removed
    for begin in range(0, max(1, len(stored), len(removed)), FRAME_BLOCKS):
        end = begin + FRAME_BLOCKS
        cleared = events.cleared and not begin
        part = BlockEvents(stored[begin:end], removed[begin:end], cleared)
        yield Frame(step=step, blocks=part)


def _parts(outputs: Sequence[EngineOutput], limit: int) -> Iterator[tuple[EngineOutput, ...]]:
    """The outputs in their order, cut by their bytes; one part at least, which may be empty."""
    begin = size = 0
    for at, output in enumerate(outputs):
        more = frame_bytes(output)
        if size and size + more > limit:
            yield tuple(outputs[begin:at])
            begin, size = at, 0
        size += more
    yield tuple(outputs[begin:])
