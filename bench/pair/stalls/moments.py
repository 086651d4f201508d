"""Moments at which streams stand still together, and what processes noted then. Pure.

Joins what the client saw with the notes of processes, both on the machine's monotonic clock.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

SHARE = 1 / 3
"""Of the open streams: more than that make a moment."""
LEAST = 2
"""Streams that stand still together, at least."""
BEFORE = 0.06
"""Seconds ahead of a moment in which its cause may lie."""
LINES = 200
LINES_EACH = 8
"""Of a moment that are told, at least."""
MOMENTS = 12
"""Of which all is told, at most: those with the most streams."""
NOTES, STACK_LINES = 2, 8
"""Of one process and moment that are told: the longest notes, and lines of stacks, or some more."""
ASLEEP = (
    *("wait threading.py", "_worker thread.py", "select selectors.py", "run runners.py"),
    *("_wait io.py", "run stillness.py", "poll poll.py", "_wait tcp_streams.py"),
    *("nap naps.py", "sleep_on naps.py"),
)
"""Functions in which threads lie that have nothing to do (under asyncio's ``run`` uvloop waits)."""
BASES = (
    *(" < _loop worker/engine_proc.py", " < run_forever asyncio/", " < run asyncio/"),
    *(" < run python3", " < _bootstrap"),
)
"""Frames from which on a stack says nothing."""


class Note(NamedTuple):
    """What a process noted."""

    who: str
    at: float
    end: float
    kind: str
    text: str


class Moment(NamedTuple):
    """Streams that stand still together."""

    at: float
    end: float
    late: int
    """Streams, when most of them were."""
    open: int
    """All streams that had begun and had not ended, then."""
    longest: float
    """Seconds of the longest of their gaps."""


def moments(streams: Sequence[Sequence[float]], bound: float) -> list[Moment]:
    """Where more than a third of the open streams are in a gap over ``bound`` seconds; ``streams``
    has the times at which tokens of each came. Moments that touch are one."""
    events: list[tuple[float, int, int, float]] = []
    for times in streams:
        if len(times) < 2:
            continue
        events += [(times[0], 1, 0, 0.0), (times[-1], -1, 0, 0.0)]
        for a, b in pairwise(times):
            if b - a > bound:
                events += [(a, 0, 1, b - a), (b, 0, -1, b - a)]
    events.sort(key=lambda each: each[0])
    found: list[Moment] = []
    begun: float | None = None
    late = there = most = beside = place = 0
    longest = 0.0
    while place < len(events):
        now = events[place][0]
        while place < len(events) and events[place][0] == now:
            _, opens, delays, gap = events[place]
            there, late, place = there + opens, late + delays, place + 1
            if delays > 0 or begun is not None:
                longest = max(longest, gap)
        if late >= LEAST and late > SHARE * there:
            begun = now if begun is None else begun
            if late > most:
                most, beside = late, there
        elif begun is not None:
            found.append(Moment(begun, now, most, beside, longest))
            begun, most, longest = None, 0, 0.0
        if not late:
            longest = 0.0
    return found


def read(folder: Path) -> list[Note]:
    """Of all processes that wrote to the folder, in order; a line that is not whole yet is none."""
    lines = [
        line
        for path in folder.glob("*.stalls")
        for line in path.read_text().splitlines(keepends=True)
    ]
    notes = [Note(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(notes, key=lambda note: note.at)


def beside(moment: Moment, notes: Iterable[Note]) -> dict[str, list[Note]]:
    """What each process noted shortly before the moment and in it."""
    found: dict[str, list[Note]] = {}
    for note in notes:
        if note.end >= moment.at - BEFORE and note.at <= moment.end:
            found.setdefault(note.who, []).append(note)
    return found


def summary(moment: Moment, notes: Iterable[Note], zero: float) -> str:
    """One line: the moment, and the longest that each process noted, the longest of all first."""
    told = []
    for its in beside(moment, notes).values():
        told += heapq.nlargest(1, (each for each in its if each.kind != "stack"), key=_length)
    told.sort(key=_length, reverse=True)
    words = [f"{each.who}: {each.text.partition(';')[0]}" for each in told]
    return f"{_head(moment, zero)}: {' | '.join(words) or 'no process noted anything'}"


def report(
    found: Sequence[Moment], notes: Sequence[Note], span: tuple[float, float]
) -> tuple[list[str], list[str]]:
    """What is printed, and the file's lines; ``span`` is when the run began and ended."""
    heard = sorted({note.who for note in notes})
    costs = {note.who: note.text for note in notes if note.kind == "cost"}
    zero = span[0]
    said = [
        note
        for note in notes
        if note.kind not in ("here", "cost") and note.end >= zero - BEFORE and note.at <= span[1]
    ]
    lines = [f"{len(found)} moments in {span[1] - zero:.1f} s; processes that were watched:"]
    lines += [f"  {who}: {costs.get(who, 'no word of its cost')}" for who in heard]
    lines += ["", "In how many moments each noted what:", *_counted(found, said)]
    lines += ["", "In the whole run:", *_longest(said, zero), ""]
    worst = sorted(heapq.nlargest(MOMENTS, found, key=lambda each: each.late))
    if len(worst) < len(found):
        lines += [f"The {len(worst)} moments with the most streams:", ""]
    share = max(LINES_EACH, (LINES - len(lines)) // max(1, len(worst)) - 2)
    for each in worst:
        told = _whole(each, said, zero)
        lines += told[:share]
        lines += [f"  ({len(told) - share} lines more)"] if len(told) > share else []
        lines.append("")
    return [summary(each, said, zero) for each in found], lines


def _head(moment: Moment, zero: float) -> str:
    return (
        f"{moment.at - zero:.3f} s, {1e3 * (moment.end - moment.at):.0f} ms:"
        f" {moment.late} of {moment.open} streams, longest gap {1e3 * moment.longest:.1f} ms"
    )


def _length(note: Note) -> float:
    return note.end - note.at


def _counted(found: Sequence[Moment], notes: Sequence[Note]) -> list[str]:
    counts: Counter[tuple[str, str]] = Counter()
    for moment in found:
        for who, its in beside(moment, notes).items():
            counts.update({(who, note.kind) for note in its})
    rows = [f"  {who}: {kind} in {n} of {len(found)}" for (who, kind), n in counts.most_common(16)]
    return rows or ["  nothing"]


def _longest(notes: Sequence[Note], zero: float) -> list[str]:
    kinds: dict[tuple[str, str], list[Note]] = defaultdict(list)
    for note in notes:
        if note.kind != "stack":
            kinds[note.who, note.kind].append(note)
    rows = []
    for (who, kind), its in sorted(kinds.items()):
        worst = max(its, key=_length)
        ms = 1e3 * _length(worst)
        rows.append(
            f"  {who}: {kind} {len(its)} times, the longest {ms:.1f} ms at {worst.at - zero:.3f} s"
        )
    return rows or ["  nothing was noted"]


def _whole(moment: Moment, notes: Sequence[Note], zero: float) -> list[str]:
    """All of a moment: what each process noted, who noted the longest first, then where threads
    stood."""
    lines = [f"== {_head(moment, zero)}"]
    stacks: list[str] = []
    by_who = beside(moment, notes)
    for who in sorted(by_who, key=lambda each: -max(map(_length, by_who[each]))):
        others = [each for each in by_who[who] if each.kind != "stack"]
        lines += [
            f"  {who} {note.kind} {_when(note, moment)}: {note.text}"
            for note in sorted(heapq.nlargest(NOTES, others, key=_length))
        ]
        if len(others) > NOTES:
            lines.append(f"  {who}: {len(others) - NOTES} shorter notes")
        stacks += _stacks(who, [each for each in by_who[who] if each.kind == "stack"], moment)
    return lines + stacks


def _stacks(who: str, stacks: Sequence[Note], moment: Moment) -> list[str]:
    """Where threads stood that were at something, each place once."""
    lines: list[str] = []
    said: set[str] = set()
    for note in sorted(stacks, key=lambda each: each.end < moment.at):  # within it first
        when, *threads = note.text.splitlines()
        awake = [_cut(each) for each in threads if not _asleep(each)]
        new = [each for each in awake if each not in said]
        said.update(new)
        if new and len(lines) < STACK_LINES:
            lines.append(f"  {who} stack {_when(note, moment)}, {when}")
            lines += [f"      {each}" for each in new]
    return lines


def _when(note: Note, moment: Moment) -> str:
    return f"{1e3 * (note.at - moment.at):+.1f} to {1e3 * (note.end - moment.at):+.1f} ms"


def _asleep(thread: str) -> bool:
    function, _, place = thread.partition(": ")[2].partition(" < ")[0].partition(" ")
    return f"{function} {place.rpartition('/')[2].partition(':')[0]}" in ASLEEP


def _cut(stack: str) -> str:
    return stack[: min((at for at in map(stack.find, BASES) if at >= 0), default=len(stack))]
