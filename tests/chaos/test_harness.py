"""The harness itself: a seed is a run, and what it is there to see it sees."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.chaos.commands import main
from tests.chaos.judge import Truth, Verdict, judge
from tests.chaos.load import Answer
from tests.chaos.schedule import Kind, make_schedule
from tests.waiting import wait_for

from tandem.cli.serve.listening import free_ports

ASKED = 80
"""Questions; each is learned twice, which the stand-in answers well."""


def test_a_seed_is_a_run():
    """The same requests and faults; of another seed, others; other faults change no request."""
    one, again = make_schedule(7, 500), make_schedule(7, 500)
    assert one == again
    assert one.faults
    assert any(ask.leaves_after is not None for ask in one.asks)
    other = make_schedule(8, 500)
    assert one.asks != other.asks
    assert one.questions != other.questions
    assert one.faults != other.faults
    calm = make_schedule(7, 500, kinds=(Kind.STOP,), every=9)
    assert (calm.asks, calm.questions) == (one.asks, one.questions)
    assert {fault.kind for fault in calm.faults} == {Kind.STOP}


TRUTH = Truth((" one two", " three"), ("length", "stop"))
WHOLE = Answer(200, [" one two", " three"], ["length", "stop"])


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (WHOLE, Verdict.RIGHT),
        (replace(WHOLE, texts=[" one", ""], finishes=[None, None], left=True), Verdict.LEFT),
        (replace(WHOLE, texts=[" on", "x"], finishes=[None, None], left=True), Verdict.WRONG),
        (replace(WHOLE, texts=[" one two", " four"]), Verdict.WRONG),
        (replace(WHOLE, texts=[" one", " three"]), Verdict.WRONG),
        (replace(WHOLE, finishes=["length", "length"]), Verdict.WRONG),
        (replace(WHOLE, texts=[" one", ""], finishes=[None, None]), Verdict.WRONG),
        (Answer(200, ["", ""], [None, None], hung=True), Verdict.HUNG),
        (Answer(503, ["", ""], [None, None], error="no", retry_after="1"), Verdict.REFUSED),
        (Answer(503, ["", ""], [None, None], error="no"), Verdict.FAILED),
        (Answer(500, ["", ""], [None, None], error="no", retry_after="1"), Verdict.FAILED),
        (Answer(200, [" one", ""], [None, None], error="gave up"), Verdict.FAILED),
        (Answer(200, [" two", ""], [None, None], error="gave up"), Verdict.WRONG),
        (Answer(0, ["", ""], [None, None], broken="ReadError()"), Verdict.FAILED),
    ],
)
def test_verdicts(answer: Answer, verdict: Verdict):
    """Right is all of it; of an answer that was left or cut off, what came is right."""
    assert judge(answer, TRUTH) is verdict


Start = Callable[[str], tuple[str, int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a stand-in with a fault: its URL and pid."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(fault: str) -> tuple[str, int]:
        (port,) = free_ports(1)
        script = Path(__file__).parent / "stand_in.py"
        processes.append(subprocess.Popen([sys.executable, str(script), str(port), fault]))

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(listens)
        return f"http://127.0.0.1:{port}", processes[-1].pid

    yield begin
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("none", "all held"),
        pytest.param("busy", "all held", marks=pytest.mark.nightly),
        ("wrong", "wrong tokens"),
        pytest.param("cut", "wrong tokens", marks=pytest.mark.nightly),
        pytest.param("rude", "failed", marks=pytest.mark.nightly),
        ("hang", "hung past its deadline"),
    ],
)
def test_any_server_is_judged(
    fault: str, words: str, start: Start, capsys: pytest.CaptureFixture[str], monkeypatch
):
    """The black-box half: with stops and clients that leave, only the lie is found, with a seed."""
    monkeypatch.setattr("tests.chaos.load.LATE", 1.0)
    url, pid = start(fault)
    flags = (
        f"blackbox --url {url} --model m --pids decode={pid} --deadline 4 --longest 0.5 --sampled"
    )
    asked = f"--requests 240 --questions {ASKED} --every 60 --seed 5"
    status = main([*flags.split(), *asked.split()])
    said = capsys.readouterr().out
    assert words in said
    assert status == (0 if words == "all held" else 1)
    assert "0 faults" not in said.splitlines()
    if status:
        assert "seed 5, request" in said
        assert "--seed 5" in said.splitlines()[-1]
