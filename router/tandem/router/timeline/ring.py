"""The last calls with their records, bounded in number and in bytes.

The oldest call of the tenant that holds most is forgotten first, so that no tenant pushes out the
records of another. A tenant reads its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from tandem.protocol.recording import Recording
from tandem.router.dispatch.recorder import Scene
from tandem.router.tenant import Tenant
from tandem.router.tenant_parts import TenantParts
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
"""Estimates of the memory of each; they are good enough for a bound."""


def weigh(recording: Recording) -> int:
    """Return an estimate of a record's bytes of memory, with the rows that a view may make."""
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
        self._open: dict[int, Recording] = {}
        """Calls under way: as many as there are connections, at most."""
        self._kept: OrderedDict[int, Recording] = OrderedDict()
        self._parts: TenantParts[int] = TenantParts()

    def __len__(self) -> int:
        """Return the number of records of ended calls."""
        return len(self._kept)

    @property
    def held(self) -> int:
        """Return the bytes of all records of ended calls."""
        return self._parts.num_bytes

    def num_kept(self, reader: Tenant) -> int:
        """Return the number of records of ended calls that ``reader`` may see."""
        return len(self._kept) if reader.is_admin else self._parts.count(reader.id)

    def open(self, recording: Recording) -> None:
        """Add a call; it is not among the last ones yet, but may be found."""
        self._open[id(recording)] = recording

    def close(self, recording: Recording) -> None:
        """Close the recording of a call. One without a key is not kept, and evicts no record."""
        name = id(recording)
        self._open.pop(name, None)
        if recording.status == UNAUTHORIZED:
            return
        self._kept[name] = recording
        self._parts.add(recording.tenant, name, weigh(recording))
        while self._kept and (len(self._kept) > self.max_calls or self.held > self.max_bytes):
            gone = self._parts.first_to_go(by_bytes=len(self._kept) <= self.max_calls)
            self._parts.remove(gone)
            del self._kept[gone]

    def latest(self, most: int, reader: Tenant) -> list[Recording]:
        """Return the latest calls that ``reader`` may see, those under way first."""
        return list(islice(self._seen_by(reader), most))

    def find(self, request_id: str, reader: Tenant) -> Recording | None:
        """Return the latest call with that name or answer's id, if ``reader`` may see it."""
        for recording in self._seen_by(reader):
            name = recording.request_id
            if name == request_id or request_id.endswith(f"-{name}"):
                return recording
        return None

    def _seen_by(self, reader: Tenant) -> Iterator[Recording]:
        for each in (*reversed(self._open.values()), *reversed(self._kept.values())):
            if reader.may_read(each.tenant):
                yield each
