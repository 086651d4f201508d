"""A form that takes all time or memory ends its request; the other answers continue."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.engine_run.grammar_draws import VOCAB, compiled
from tests.waiting import wait_for

from tandem.engine.structured import process as module
from tandem.engine.structured.backends.base import Grammar
from tandem.engine.structured.constraint import make_mask
from tandem.engine.structured.errors import GrammarError, NotNow
from tandem.engine.structured.process import GrammarProcess, ProcessBackend
from tandem.protocol.structured import StructuredOutputsParams

pytestmark = pytest.mark.timeout(300)

HUGE = "(a|b)*a(a|b){28}"
"""An expression of 2^28 states."""
SECONDS = 200.0
"""Limit of what is to succeed, however slow the machine."""
SOON = 0.3
"""Limit of what is to take too long."""
TICKS = 20
"""Processor time that only a form in hand takes."""


@pytest.fixture
def backend(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessBackend]:
    limit(monkeypatch, SECONDS)
    made = ProcessBackend("outlines", GrammarProcess(smollm2, VOCAB))
    yield made
    made.close()


def limit(monkeypatch: pytest.MonkeyPatch, seconds: float, *names: str) -> None:
    """Set deadlines, all if none is named."""
    for name in names or ("LOAD", "COMPILE", "TURN", "FOLLOW"):
        monkeypatch.setattr(module, f"{name}_SECONDS", seconds)


def pid_of(backend: ProcessBackend) -> int:
    pid = backend._process.pid
    assert pid is not None
    return pid


def begun(backend: ProcessBackend) -> tuple[Grammar, bytes]:
    """Return an answer after two tokens, and its mask."""
    grammar = compiled(backend, regex="[a-c]{2}[0-9]{2}")
    for _ in range(2):
        grammar.accept([lowest(make_mask(grammar, VOCAB, ()))])
    return grammar, bytes(make_mask(grammar, VOCAB, ()))


def lowest(mask: bytearray) -> int:
    """Return the first token of a mask."""
    words = int.from_bytes(mask, "little")
    return (words & -words).bit_length() - 1


def ticks(pid: int) -> int:
    """Return the processor time of a process so far."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_an_answer_continues_in_the_next_process(backend: ProcessBackend) -> None:
    """Its copy and its tokens do after a kill, with the masks that they had."""
    grammar, mask = begun(backend)
    copy, first = grammar.copy(), pid_of(backend)
    os.kill(first, signal.SIGKILL)
    copy.accept([lowest(bytearray(mask))])
    after = make_mask(copy, VOCAB, ())
    assert pid_of(backend) != first
    grammar.accept([lowest(bytearray(mask))])
    assert make_mask(grammar, VOCAB, ()) == after


@pytest.mark.full
def test_a_compile_that_takes_too_long_ends_alone(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is followed meanwhile and after it, and the next form compiles."""
    grammar, mask = begun(backend)
    first = pid_of(backend)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as threads:
        limit(patch, 3.0, "COMPILE")
        before = ticks(first)
        slow = threads.submit(compiled, backend, regex=HUGE)
        wait_for(lambda: ticks(first) >= before + TICKS, SECONDS)
        token = lowest(bytearray(mask))
        meanwhile = grammar.copy()
        meanwhile.accept([token])
        following = make_mask(meanwhile, VOCAB, ())
        assert pid_of(backend) == first
        with pytest.raises(GrammarError, match="a format that compiles within 3 s"):
            slow.result(SECONDS)
    grammar.accept([token])
    assert make_mask(grammar, VOCAB, ()) == following
    assert pid_of(backend) != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert any(make_mask(compiled(backend, choice=["a"]), VOCAB, ()))


@pytest.mark.full
def test_a_compile_beyond_memory_is_refused(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, SECONDS)
    process = GrammarProcess(smollm2, VOCAB, memory_bytes=96 << 20)
    backend = ProcessBackend("outlines", process)
    try:
        with pytest.raises(GrammarError, match=r"within 96 MiB of memory|in the memory limit"):
            compiled(backend, regex=HUGE)
        assert any(make_mask(compiled(backend, choice=["a"]), VOCAB, ()))
    finally:
        process.close()


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (signal.SIGKILL, NotNow, "ended with status -9"),
        (signal.SIGXCPU, GrammarError, "a format that compiles within 200 s"),
    ],
)
def test_a_compile_ends_with_its_process(
    backend: ProcessBackend, sent: signal.Signals, error: type[GrammarError], words: str
) -> None:
    """It may be asked again, unless its processor time was spent."""
    compiled(backend, regex="a")
    pid = pid_of(backend)
    with ThreadPoolExecutor(1) as threads:
        before = ticks(pid)
        lost = threads.submit(compiled, backend, regex=HUGE)
        wait_for(lambda: ticks(pid) >= before + TICKS, SECONDS)
        limits = Path(f"/proc/{pid}/limits").read_text()
        os.kill(pid, sent)
        with pytest.raises(error, match=words):
            lost.result(SECONDS)
    assert re.search(r"Max cpu time +2[0-9]{2} +unlimited", limits), limits
    assert re.search(r"Max address space +[0-9]+ ", limits), limits


def test_a_mask_that_is_late_ends_its_request(
    backend: ProcessBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is stopped; another answer continues in the next one."""
    grammar, mask = begun(backend)
    late = grammar.copy()
    late.accept([lowest(bytearray(mask))])
    os.kill(pid_of(backend), signal.SIGSTOP)
    with monkeypatch.context() as patch:
        limit(patch, SOON, "FOLLOW")
        with pytest.raises(GrammarError, match=r"checks tokens within 0\.3 s"):
            make_mask(late, VOCAB, ())
    grammar.accept([lowest(bytearray(mask))])
    assert any(make_mask(grammar, VOCAB, ()))


def test_a_closed_process_compiles_nothing(backend: ProcessBackend) -> None:
    pid = pid_of(backend)
    backend.close()
    backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(NotNow, match="closed"):
        backend.compile(StructuredOutputsParams(regex="a"))


def test_the_process_ends_with_the_engine(backend: ProcessBackend) -> None:
    """It does when no other process has the other end of a channel."""
    running = backend._process._running
    assert running is not None
    running.following.close()
    assert running.process.wait(SECONDS) == 0


def test_an_answer_that_ended_is_forgotten(backend: ProcessBackend) -> None:
    """Its number goes to the process with the next message."""
    grammar, _ = begun(backend)
    number = grammar.number  # type: ignore[attr-defined]
    del grammar
    assert number in backend._process.ended
    begun(backend)
    assert number not in backend._process.ended
