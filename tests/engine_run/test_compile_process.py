"""Texts that would take for ever, or all memory: an error of theirs, and of nobody else."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.engine_run.grammar_draws import VOCAB, compiled
from tests.waiting import wait_for

from tandem.engine.executor.channel import Channel
from tandem.engine.structured.backends import AutoCompiler
from tandem.engine.structured.grammar import GrammarError, Waits, untold
from tandem.engine.structured.llguidance import LLGuidanceCompiler
from tandem.engine.structured.outlines import OutlinesCompiler, compile_process
from tandem.engine.structured.outlines.compile_process import (
    CompileProcess,
    LostError,
    OvertimeError,
)
from tandem.engine.structured.outlines.jobs import Job
from tandem.engine.structured.outlines.lanes import MAX_SLOW, BusyError, Lanes
from tandem.engine.structured.outlines.tables import MAX_STATES

pytestmark = pytest.mark.timeout(600)

HUGE = "(?:a|b)*a(?:a|b){28}"
"""2^28 states."""
SHORT = Job(expression="yes|no")
SECONDS = 600.0
"""Of a text that is to be through, or to fail by something else: however slow the machine."""
SOON = 0.3
"""Of a text that is to take too long."""
TICKS = 5
"""Of processor time that nothing but a text in hand takes."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may begin as slowly as it likes."""
    monkeypatch.setattr(compile_process, "START_SECONDS", SECONDS)


@pytest.fixture
def process() -> Iterator[CompileProcess]:
    """One that may take what it needs."""
    made = CompileProcess()
    yield made
    made.close()


def test_a_text_that_takes_too_long_is_ended_and_the_next_compiles(process: CompileProcess):
    """The process is another one then."""
    assert process.compile(SHORT, SECONDS).after.shape[0] > 2
    first = process.pid
    with pytest.raises(OvertimeError, match=r"compiles within 0\.3 s"):
        process.compile(Job(expression=HUGE), SOON)
    assert process.compile(SHORT, SECONDS).after.shape[0] > 2
    assert process.pid != first
    assert first is not None
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_a_text_that_takes_too_much_memory_is_told_so():
    """By the kernel's limit, and the next compiles."""
    process = CompileProcess(memory_bytes=400 << 20)
    try:
        with pytest.raises(GrammarError, match=r"within 400 MiB of memory|within less memory"):
            process.compile(Job(expression=HUGE), SECONDS)
        assert process.compile(SHORT, SECONDS).after.shape[0] > 2
    finally:
        process.close()


def test_a_process_that_is_killed_costs_its_text_alone(process: CompileProcess):
    """Whoever kills it: the text in hand is told to ask again, and one that waited compiles."""
    process.compile(SHORT, SECONDS)
    pid = process.pid
    assert pid is not None
    with ThreadPoolExecutor(2) as threads:
        before = _ticks(pid)
        lost = threads.submit(process.compile, Job(expression=HUGE), SECONDS)
        wait_for(lambda: _ticks(pid) >= before + TICKS, SECONDS)
        behind = threads.submit(process.compile, SHORT, SECONDS)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LostError, match="asked again: the compile process ended by signal 9"):
            lost.result(SECONDS)
        assert behind.result(SECONDS).after.shape[0] > 2


def _ticks(pid: int) -> int:
    """Processor time of a process's own code so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_processor_time_and_memory_are_limited_by_the_kernel(process: CompileProcess):
    """Time anew for each text; a job beyond it is one that took too long."""
    process.compile(SHORT, 60.0)
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert re.search(r"Max cpu time +6[0-9] +unlimited", limits), limits
    assert re.search(rf"Max address space +{2 << 30} +{2 << 30}", limits), limits


def test_a_process_that_ends_by_its_processor_time_took_too_long(process: CompileProcess):
    """As the kernel ends it."""
    process.compile(SHORT, SECONDS)
    pid = process.pid
    assert pid is not None
    with ThreadPoolExecutor(1) as threads:
        before = _ticks(pid)
        ended = threads.submit(process.compile, Job(expression=HUGE), SECONDS)
        wait_for(lambda: _ticks(pid) >= before + TICKS, SECONDS)
        os.kill(pid, signal.SIGXCPU)
        with pytest.raises(OvertimeError):
            ended.result(SECONDS)


def test_a_table_beyond_the_bound_is_refused(process: CompileProcess):
    """It compiles in time, and is not sent."""
    with pytest.raises(GrammarError, match=f"at most {MAX_STATES:,} states"):
        process.compile(Job(expression="(?:a|b)*a(?:a|b){16}"), SECONDS)


def test_a_closed_process_takes_nothing(process: CompileProcess):
    """And it is gone, whatever it was doing."""
    process.compile(SHORT, SECONDS)
    pid = process.pid
    assert pid is not None
    process.close()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(GrammarError, match="closed"):
        process.compile(SHORT, SECONDS)


def test_a_process_ends_with_the_engine(process: CompileProcess):
    """When nobody holds the other end of its channel any more."""
    process.compile(SHORT, SECONDS)
    child, channel = process._process, process._channel
    assert child is not None
    assert channel is not None
    channel.close()
    assert child.wait(SECONDS) == 0


def test_a_text_says_that_it_waits_for_its_turn(process: CompileProcess):
    """Until it has the process: others' time is not its own."""
    told: list[bool] = []
    process.compile(SHORT, SECONDS)
    with ThreadPoolExecutor(1) as threads:
        with process._turn:
            second = threads.submit(process.compile, SHORT, SECONDS, told.append)
            wait_for(lambda: told)
            assert told == [True]
        second.result(SECONDS)
    assert told == [True, False]


def test_texts_behind_slow_ones_compile_meanwhile():
    """Two slow ones are in the other process; a third is told so, and quick ones are through."""
    lanes = Lanes(quick_seconds=SECONDS, slow_seconds=SECONDS)
    slow = [Job(expression=f"{HUGE}{sign}") for sign in "xyz"]
    try:
        lanes.compile(SHORT)
        with ThreadPoolExecutor(MAX_SLOW) as threads:
            lanes._seconds = (SOON, SECONDS)
            waiting = [threads.submit(lanes.compile, job) for job in slow[:MAX_SLOW]]
            wait_for(lambda: not lanes._places._value, SECONDS)
            lanes._seconds = (SECONDS, SECONDS)
            assert lanes.compile(Job(expression="a{3}")).after.shape[0] > 2
            lanes._seconds = (SOON, SECONDS)
            with pytest.raises(BusyError, match=f"while {MAX_SLOW} others take longer"):
                lanes.compile(slow[-1])
            assert not any(each.done() for each in waiting)
            lanes.close()
            for each in waiting:
                with pytest.raises(GrammarError):
                    each.result(SECONDS)
    finally:
        lanes.close()


class Counted(Lanes):
    """Lanes that count what they are given."""

    def __init__(self) -> None:
        super().__init__(quick_seconds=SECONDS, slow_seconds=SECONDS)
        self.jobs: list[Job] = []

    def compile(self, job: Job, waits: Waits = untold) -> object:  # type: ignore[override]
        """See Lanes."""
        self.jobs.append(job)
        return super().compile(job, waits)


def test_equal_texts_compile_once_and_too_slow_ones_are_remembered(smollm2: Path):
    """Four threads with one text, one that takes too long, twice, and one that is refused."""
    lanes = Counted()
    compiler = OutlinesCompiler(smollm2, VOCAB, lanes)
    together = threading.Barrier(4)

    def ask(_: int) -> bool:
        together.wait(SECONDS)
        return compiled(compiler, regex="[ab]{7}").is_terminated

    try:
        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(ask, range(4))) == [False] * 4
        assert len(lanes.jobs) == 1
        for regex, count, seconds in ((HUGE, 2, SOON), (r"\p{Nothing}", 3, SECONDS)):
            lanes._seconds = (seconds, seconds)
            for _ in range(2):
                with pytest.raises(GrammarError):
                    compiled(compiler, regex=regex)
            assert len(lanes.jobs) == count
    finally:
        compiler.close()


def test_a_text_that_was_lost_is_tried_again(smollm2: Path):
    """It was not its fault."""
    lanes = Lanes(quick_seconds=SECONDS)
    compiler = OutlinesCompiler(smollm2, VOCAB, lanes)
    try:
        compiled(compiler, regex="a")
        pid = lanes.quick.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LostError):
            compiled(compiler, regex="[cd]{9}")
        compiled(compiler, regex="[cd]{9}")
    finally:
        compiler.close()


def tagged(of: str) -> str:
    """A schema that guidance refuses and outlines follows."""
    kinds = {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "of": {"type": of}},
            "required": ["kind"],
        }
        for kind in "ab"
    }
    return json.dumps({"oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds], "$defs": kinds})


def test_what_is_made_once_is_said_to_be_made(smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    """The compiler itself, at auto's first use of it, and the first process; no later one."""
    making, beginning = threading.Event(), threading.Event()
    lanes, receive = Lanes(quick_seconds=SECONDS), Channel.receive

    def made(folder: Path, vocab_size: int) -> OutlinesCompiler:
        assert making.wait(SECONDS)
        return OutlinesCompiler(folder, vocab_size, lanes)

    def received(channel: Channel, **bounds: Any) -> bytes:
        assert beginning.wait(SECONDS)
        return receive(channel, **bounds)

    monkeypatch.setattr("tandem.engine.structured.backends._outlines", made)
    monkeypatch.setattr(Channel, "receive", received)
    auto = AutoCompiler(LLGuidanceCompiler(smollm2, VOCAB), smollm2, VOCAB)
    assert not auto.is_preparing
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(compiled, auto, json=tagged("integer"))
        wait_for(lambda: auto.is_preparing)
        making.set()
        wait_for(lambda: lanes.quick.is_beginning)
        assert auto.is_preparing
        beginning.set()
        assert first.result(SECONDS).is_accepting is False
        assert not auto.is_preparing

        lanes.quick._end()
        beginning.clear()
        second = threads.submit(compiled, auto, json=tagged("boolean"))
        wait_for(lambda: lanes.quick.pid)
        assert not auto.is_preparing
        beginning.set()
        assert second.result(SECONDS).is_accepting is False
    auto.close()
