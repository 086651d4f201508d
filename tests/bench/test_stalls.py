"""Who stood still when streams did: joined from times and notes, and noted within a process."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest
from bench.pair import counted, imports, stalls
from bench.pair.stalls import moments, watcher
from bench.pair.stalls.moments import Moment, Note

DEADLINE = 60.0


def steady(begin: float, end: float, *, without: tuple[float, float] = (0.0, 0.0)) -> list[float]:
    """A token every 10 ms, but none within ``without``."""
    times = [begin + 0.01 * n for n in range(round((end - begin) / 0.01) + 1)]
    return [each for each in times if not without[0] < each < without[1]]


def test_streams_that_stand_still_together_are_one_moment() -> None:
    """Its beginning, end, how many of how many, and the longest gap."""
    streams = [steady(0.0, 2.0, without=(1.0, 1.0 + 0.001 * late)) for late in (40, 50, 60)]
    streams += [steady(0.0, 2.0), steady(0.0, 0.5), steady(1.5, 2.0)]
    (found,) = moments.moments(streams, 0.025)
    assert (found.late, found.open) == (3, 4)
    assert found.at == pytest.approx(1.0)
    assert 1.05 <= found.end <= 1.06 + 1e-9  # one of four alone is no moment
    assert found.longest == pytest.approx(0.06)


def test_few_late_streams_among_many_are_no_moment() -> None:
    """A third at most, or a single one."""
    still = (1.0, 1.05)
    few = [steady(0.0, 2.0, without=still)] * 2 + [steady(0.0, 2.0)] * 4
    assert moments.moments(few, 0.025) == []
    assert moments.moments([steady(0.0, 2.0, without=still)], 0.025) == []
    assert moments.moments([[], [1.0]], 0.025) == []


def test_moments_apart_are_two() -> None:
    """Each has its own longest gap."""
    gaps = [[0.0, 0.04, 0.05, 0.06, 0.16, 0.17], [0.0, 0.04, 0.05, 0.06, 0.16, 0.17]]
    found = moments.moments(gaps, 0.025)
    assert [(each.at, each.end) for each in found] == [(0.0, 0.04), (0.06, 0.16)]
    assert [each.longest for each in found] == pytest.approx([0.04, 0.1])


def test_a_moment_is_told_what_came_shortly_before_and_in_it() -> None:
    """Of each process; earlier and later notes are left out, and the longest is said first."""
    moment = Moment(10.0, 10.03, 90, 100, 0.035)
    notes = [
        Note("router 1", 9.0, 9.9, "gc", "long ago"),
        Note("router 1", 9.94, 9.96, "gc", "just before"),
        Note("decode 2", 9.99, 10.03, "turn", "a turn took 40.0 ms: wait 39.9; of 90 decodes"),
        Note(
            "decode 2",
            10.0,
            10.02,
            "stack",
            "20 ms\nthe watched thread: f a/a.py:1 < run python3.11/threading.py:9\n"
            "io: nap link/naps.py:1",
        ),
        Note("prefill 3", 10.04, 10.05, "turn", "afterwards"),
    ]
    found = moments.beside(moment, notes)
    assert {who: len(its) for who, its in found.items()} == {"router 1": 1, "decode 2": 2}
    assert moments.summary(moment, notes, 9.0) == (
        "1.000 s, 30 ms: 90 of 100 streams, longest gap 35.0 ms:"
        " decode 2: a turn took 40.0 ms: wait 39.9 | router 1: just before"
    )
    printed, lines = moments.report([moment], notes, (9.0, 12.0))
    text = "\n".join(lines)
    assert len(printed) == 1
    assert "decode 2: turn in 1 of 1" in text
    assert "the watched thread: f a/a.py:1\n" in text
    assert "naps.py" not in text  # a thread that has nothing to do


def test_a_report_is_short() -> None:
    """Whatever was noted."""
    found = [Moment(float(n), n + 0.03, 5, 6, 0.03) for n in range(300)]
    stack = "12 ms\nthe watched thread: f a.py:{n}\nother: g b.py:{n}"
    notes = [
        Note(f"decode {who}", n + 0.01, n + 0.02, kind, stack.format(n=n))
        for n in range(300)
        for who in range(4)
        for kind in ("turn", "stack")
    ]
    _, lines = moments.report(found, notes, (0.0, 300.0))
    assert len(lines) < 260


def test_placements_are_counted_by_way() -> None:
    """Between two looks at the router's metrics."""
    way = 'tandem:router_forecast_error_seconds_count{way="pair"}'
    rung = 'tandem:router_attempts_total{rung="first",shape="handoff"}'
    before = {way: 2.0, rung: 4.0, "tandem:other": 1.0}
    after = {way: 5.0, rung: 4.0, "tandem:other": 9.0}
    assert counted.ways(before, after) == {"way=pair": 3}


def test_a_workers_own_times_are_means_of_its_prompts() -> None:
    """Over all labels; of none, 0."""
    prefill, model = "vllm:request_prefill_time_seconds", '{model_name="m"}'
    before = {f"{prefill}_sum{model}": 1.0, f"{prefill}_count{model}": 2.0}
    after = {f"{prefill}_sum{model}": 1.5, f"{prefill}_count{model}": 6.0}
    assert counted.spans_ms(before, after) == {"prefill": 125.0, "queue": 0.0}


class Standing:
    """Stands since it was made."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def stands(self, now: float) -> tuple[float, str]:
        """See Heart."""
        return max(0.0, now - self._since - watcher.LATE_SECONDS), "a test"


def noted_of(folder: Path, kind: str) -> list[str]:
    """What was written of that kind."""
    return [note.text for note in moments.read(folder) if note.kind == kind]


def test_where_the_watched_thread_stands_is_noted(tmp_path: Path) -> None:
    """With this very function among its frames, three times at most."""
    watching = watcher.Watcher(watcher.Notes("test", tmp_path), Standing())
    watching.start()
    until = time.monotonic() + DEADLINE
    while not noted_of(tmp_path, "stack") and time.monotonic() < until:
        time.sleep(0.01)
    watching.stop()
    told = [each for each in noted_of(tmp_path, "stack") if "in a test" in each]
    assert 1 <= len(told) <= watcher.LOOKS
    here = test_where_the_watched_thread_stands_is_noted.__name__
    assert any(here in each.splitlines()[1] for each in told)


def test_passes_of_the_collector_and_a_late_loop_are_noted(tmp_path: Path) -> None:
    """Of a process whose loop does something long; nothing is left behind in the collector."""

    async def stand() -> None:
        with stalls.watched("test", tmp_path):
            await asyncio.sleep(0.05)
            kept = [[n, [n]] for n in range(300_000)]
            gc.collect()
            assert len(kept) == 300_000
            time.sleep(0.05)  # noqa: ASYNC251
            await asyncio.sleep(0.05)

    before = list(gc.callbacks)
    asyncio.run(stand())
    assert gc.callbacks == before
    assert any(each.startswith("collector, generation 2") for each in noted_of(tmp_path, "gc"))
    assert noted_of(tmp_path, "loop")


def test_processes_of_a_stack_are_told_to_install(tmp_path: Path) -> None:
    """By a sitecustomize that comes before all else."""
    folder = tmp_path / "noted"
    found = imports.environment(stalls.install, stalls.FOLDER, folder)
    site = Path(found["PYTHONPATH"].split(":")[0]) / "sitecustomize.py"
    assert site.read_text() == "from bench.pair.stalls import install\n\ninstall()\n"
    assert found[stalls.FOLDER] == str(folder)


def test_a_process_that_always_stands_is_looked_at_only_now_and_then(tmp_path: Path) -> None:
    """Looks take the interpreter: those over what is allowed are left out."""
    watching = watcher.Watcher(watcher.Notes("test", tmp_path), Standing())
    now = time.monotonic()
    for _ in range(200):
        watching._say_where(now, now, "now")
    watching._notes.write()
    watching._stacks.close()
    assert len(noted_of(tmp_path, "stack")) == watcher.LOOKS_AT_ONCE


def test_where_threads_stand_is_read_of_faulthandler() -> None:
    """Functions with their places, by thread, the innermost first."""
    text = (
        "Current thread 0x00007f01 (most recent call first):\n"
        '  File "/a/b/c.py", line 12 in <listcomp>\n  File "/a/d.py", line 7 in run\n\n'
        'Thread 0x00007f02 (most recent call first):\n  File "e.py", line ??? in f\n'
    )
    assert watcher.parsed(text) == {
        0x7F01: ["<listcomp> b/c.py:12", "run a/d.py:7"],
        0x7F02: ["f e.py:???"],
    }


def test_what_does_not_come_for_a_while_is_noted(tmp_path: Path) -> None:
    """But not what comes as usual."""
    notes = watcher.Notes("test", tmp_path)
    quiet = watcher.Quiet(notes, "heard nothing of a worker")
    quiet.came()
    quiet._last -= 0.1
    quiet.came()
    quiet._last -= 2.0  # nothing was to come
    quiet.came()
    notes.write()
    assert len(noted_of(tmp_path, "quiet")) == 1
