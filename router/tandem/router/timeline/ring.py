"""The last calls with their records: bounded in number and in bytes, the oldest forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from tandem.protocol.recording import Recording
from tandem.router.dispatch.recorder import Scene
from tandem.router.timeline.view import MAX_SHORT_PARTS

UNAUTHORIZED = 401
_CALL_BYTES = 1_500
_MARK_BYTES = 120
_LEG_BYTES = 500
_NOTE_BYTES = 130
_VIEW_BYTES = 600
_LINK_BYTES = 100
_PACE_BYTES = 350
_ROW_BYTES = 60
"""About what each takes in memory; estimates are good enough for a bound."""


def weigh(recording: Recording) -> int:
    """About how many bytes of memory a record holds, with the rows that a view may make of it."""
    num_covers = len(recording.marks)
    size = _CALL_BYTES + _MARK_BYTES * len(recording.marks)
    size += len(recording.request_id) + len(recording.path)
    for attempt in recording.attempts:
        size += _MARK_BYTES + len(attempt.failure or "")
        if isinstance(attempt.scene, Scene):
            fleet = attempt.scene.fleet
            size += _VIEW_BYTES * len(fleet.workers) + _PACE_BYTES * len(fleet.paces)
            size += _LINK_BYTES * (len(fleet.links) + len(fleet.pull_links))
        num_covers += 2
        for leg in attempt.legs:
            size += _LEG_BYTES
            if leg.times is not None:
                size += _NOTE_BYTES * len(leg.times.notes)
                num_covers += len(leg.times.notes) + 2
    # Each begins or ends a part, and what nobody covers is one.
    return size + _ROW_BYTES * min(2 * num_covers + 3, MAX_SHORT_PARTS + 1)


class Ring:
    """One per app; used in the loop's thread."""

    def __init__(self, max_calls: int, max_bytes: int) -> None:
        self.max_calls = max_calls
        self.max_bytes = max_bytes
        self.held = 0
        """Bytes of all records of calls that are over."""
        self._open: dict[int, Recording] = {}
        """Calls under way: as many as there are connections, at most."""
        self._kept: OrderedDict[int, tuple[Recording, int]] = OrderedDict()

    def __len__(self) -> int:
        """Records of calls that are over."""
        return len(self._kept)

    def open(self, recording: Recording) -> None:
        """A call has come; it is not among the last ones yet, but may be found."""
        self._open[id(recording)] = recording

    def close(self, recording: Recording) -> None:
        """A call is over. One without a key is not kept: strangers push nobody's record out."""
        self._open.pop(id(recording), None)
        if recording.status == UNAUTHORIZED:
            return
        size = weigh(recording)
        self._kept[id(recording)] = (recording, size)
        self.held += size
        while self._kept and (len(self._kept) > self.max_calls or self.held > self.max_bytes):
            _, (_, gone) = self._kept.popitem(last=False)
            self.held -= gone

    def latest(self, most: int) -> list[Recording]:
        """The latest calls, those under way first."""
        kept = (each for each, _ in reversed(self._kept.values()))
        return list(islice((*reversed(self._open.values()), *islice(kept, most)), most))

    def find(self, request_id: str) -> Recording | None:
        """The latest call of that name, or whose answer has it as its id."""
        kept = (each for each, _ in reversed(self._kept.values()))
        for recording in (*reversed(self._open.values()), *kept):
            name = recording.request_id
            if name == request_id or request_id.endswith(f"-{name}"):
                return recording
        return None
