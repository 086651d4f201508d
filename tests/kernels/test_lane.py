"""How a lane cuts batches, foretells their ends and reuses its events.

A GPU runs the copies, and its driver's calls are four: those are played here by a script that says
when each copy is through and what its events show. That real streams keep the order, and that the
driver's own functions are called rightly, only tests/kvtransfer/gpu can show.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

import numpy as np
import pytest

from tandem.memory import copies as lanes
from tandem.memory.copies import FIRST_BYTES, MORE_BYTES, Lane, LaneMark
from tandem.memory.device import DeviceMemoryError, DeviceRange

MIB = 1 << 20
BLOCK = 9 * MIB
NOT_READY, LOST = 600, 719


class Device:
    """A stream whose copies are through when the test says so, at a rate that it says."""

    cuda_stream = 5

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int, int]]] = []
        """Of each call: targets, sources and sizes."""
        self.made = 0
        self.recorded: dict[int, int] = {}
        """By event: bytes before it."""
        self.through = 0
        self.bytes_per_s = 300e9
        self.fails = False

    @property
    def told(self) -> int:
        return sum(size for call in self.calls for *_, size in call)

    def copy_many(self, targets: Any, sources: Any, sizes: Any, stream: int) -> None:
        assert stream == self.cuda_stream
        rows = (each.tolist() for each in (targets, sources, sizes))
        self.calls.append(list(zip(*rows, strict=True)))

    def call(self, name: str, *words: Any) -> None:
        if name == "cuEventCreate":
            self.made += 1
            words[0]._obj.value = self.made
        elif name == "cuEventRecord":
            self.recorded[words[0].value] = self.told
        else:
            assert name == "cuEventElapsedTime"
            begin, end = (self.recorded[each.value] for each in words[1:])
            words[0]._obj.value = (end - begin) / self.bytes_per_s * 1e3

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        assert event.value is not None
        if self.fails:
            return LOST
        return 0 if self.recorded[event.value] <= self.through else NOT_READY


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr("torch.cuda.Stream", lambda _where: found)
    monkeypatch.setattr(lanes, "copy_many", found.copy_many)
    monkeypatch.setattr(lanes, "call_driver", found.call)
    monkeypatch.setattr(lanes, "driver", lambda: found)
    return found


def begun(lane: Lane, source: DeviceRange, *sizes: int) -> LaneMark:
    """Copies of these sizes, and the mark behind them."""
    numbers = np.arange(len(sizes), dtype=np.int64)
    lane.copy(numbers, numbers + 1000, np.array(sizes, dtype=np.int64), source)
    return lane.mark()


def test_the_first_ranges_go_alone_and_all_go_once_in_order(device: Device) -> None:
    """In calls of some bytes each: the device copies while the rest is prepared."""
    begun(Lane(0), DeviceRange(0, 1 << 40, 0), *[BLOCK] * 100)
    assert [len(call) for call in device.calls] == [4, 32, 32, 32]
    assert [row for call in device.calls for row in call] == [
        (number, number + 1000, BLOCK) for number in range(100)
    ]


def test_a_range_that_is_larger_than_a_call_goes_by_itself(device: Device) -> None:
    """However large; none is left out."""
    sizes = [FIRST_BYTES + 1, MORE_BYTES + 1, MORE_BYTES, MIB]
    begun(Lane(0), DeviceRange(0, 1 << 40, 0), *sizes)
    assert [[row[2] for row in call] for call in device.calls] == [[each] for each in sizes]


def test_an_end_is_foretold_from_what_the_device_said_of_earlier_copies(device: Device) -> None:
    """Not before one was timed; then behind the copies that are under way before it."""
    lane, source = Lane(0), DeviceRange(0, 1 << 40, 0)
    first = begun(lane, source, *[BLOCK] * 40)
    assert first.due == math.inf
    assert not first.done()
    device.through = device.told
    assert first.done()
    assert first.due == -math.inf

    at = time.perf_counter()
    second, third = (begun(lane, source, *[BLOCK] * 40) for _ in range(2))
    seconds = 40 * BLOCK / device.bytes_per_s
    assert at < second.due < time.perf_counter() + seconds
    assert third.due == pytest.approx(second.due + seconds, abs=1e-6)
    other = begun(lane, DeviceRange(0, 1 << 40, 0), BLOCK)
    assert other.due == math.inf, "of another source nothing is known"


def test_what_is_timed_leaves_out_the_first_call(device: Device) -> None:
    """Behind it the device had to begin, which says nothing of bytes; one call alone says
    nothing."""
    lane, source = Lane(0), DeviceRange(0, 1 << 40, 0)
    mark, device.through = begun(lane, source, BLOCK), 1 << 40
    assert mark.done()
    assert source.rate.seconds_for(BLOCK) == math.inf
    device.bytes_per_s = 100e9
    assert begun(lane, source, *[BLOCK] * 36).done()
    assert source.rate.seconds_for(32 * BLOCK) == pytest.approx(32 * BLOCK / 100e9)


def test_copies_of_several_calls_end_by_one_mark(device: Device) -> None:
    """Those of an earlier one that was not marked, too; a mark behind nothing is through."""
    lane, source = Lane(0), DeviceRange(0, 1 << 40, 0)
    assert lane.mark().done()
    one, sizes = np.zeros(1, dtype=np.int64), np.array([BLOCK], dtype=np.int64)
    lane.copy(one, one, sizes, source)
    mark, device.through = begun(lane, source, BLOCK), BLOCK
    assert not mark.done()
    device.through = 2 * BLOCK
    assert mark.done()


def test_events_are_used_again_and_no_sooner(device: Device) -> None:
    """Two a mark, of those under way at once; one that is through is asked no more."""
    lane, source = Lane(0), DeviceRange(0, 1 << 40, 0)
    marks = [begun(lane, source, BLOCK) for _ in range(3)]
    assert device.made == 6
    device.through = device.told
    assert all(each.done() for each in marks)
    later = [begun(lane, source, BLOCK) for _ in range(3)]
    assert device.made == 6
    assert all(each.done() for each in marks), "though their events are others' now"
    assert not any(each.done() for each in later)


def test_a_copy_that_failed_says_so(device: Device) -> None:
    """Each time it is asked for."""
    mark = begun(Lane(0), DeviceRange(0, 1 << 40, 0), BLOCK)
    device.fails = True
    for _ in range(2):
        with pytest.raises(DeviceMemoryError, match="error 719"):
            mark.done()
