"""Workers of a local stack that share a GPU start in turn, each with its part of the memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.cli.acted_stack import Actor, Stack

from tandem.cli.serve import up
from tandem.cli.serve.overrides import Overrides
from tandem.cli.serve.stack import UpConfig
from tandem.cli.serve.up import Supervisor


def test_two_on_one_gpu_start_in_turn_with_half_of_it_each():
    """At once, both would find it empty and take all; the router waits for nobody."""
    stack = Stack(["prefill", "decode", "router"], ["0"], {})
    assert stack.step() == ["prefill-0", "router-2"]
    assert stack.step() == []
    assert stack.step(0) == ["decode-1"]
    assert stack.shares() == ["0.4500", "0.9000", None]
    (said,) = stack._turns.described()
    assert said == (
        "prefill-0, decode-1 share GPU 0 and start one after the other; 0.9 of its memory is "
        "divided evenly among them (--gpu-memory-utilization)"
    )


def test_a_machine_that_does_not_name_its_gpus_has_one():
    """All workers take the first that they see."""
    assert Stack(["prefill", "decode"], [], {}).step() == ["prefill-0"]


def test_one_that_starts_again_takes_what_the_others_leave():
    """Whichever of three it is; two that ended at once take turns again."""
    stack = Stack(["prefill", "decode", "decode"], ["0"], {})
    for number in range(3):
        stack.step(*range(number))
    assert stack.step(2) == []
    assert stack.shares() == ["0.3000", "0.6000", "0.9000"]
    stack.end(0, 1)
    assert stack.step() == ["prefill-0"]
    assert stack.step(0) == ["decode-1"]
    assert stack.shares() == ["0.6000", "0.9000", "0.9000"]


def test_who_never_serves_is_not_waited_for_without_end():
    stack = Stack(["prefill", "decode"], ["0"], {})
    stack.step()
    assert stack.step() == []
    stack.children[0].started -= 301.0
    assert stack.step() == ["decode-1"]


def test_a_gpu_for_each_starts_all_at_once():
    """Nothing is divided, and nothing said; a third on two GPUs waits for the first."""
    stack = Stack(["prefill", "decode"], ["0", "1"], {})
    assert stack.step() == ["prefill-0", "decode-1"]
    assert stack.shares() == [None, None]
    assert not list(stack._turns.described())
    stack = Stack(["prefill", "prefill", "decode"], ["a", "b"], {})
    assert stack.step() == ["prefill-0", "prefill-1"]
    assert stack.step(0) == ["decode-2"]
    assert stack.shares() == ["0.4500", None, "0.9000"]
    assert "prefill-0, decode-2 share GPU a" in next(stack._turns.described())


def test_a_cpu_has_no_turns():
    """Whatever GPUs there are: of two workers, one may be told to compute on the CPU."""
    stack = Stack(["prefill", "decode"], ["0"], {"decode": {"device": "cpu"}})
    assert stack.step() == ["prefill-0", "decode-1"]
    assert stack.shares() == [None, None]


def test_flags_and_environment_reach_the_turns(monkeypatch: pytest.MonkeyPatch):
    """Whatever way a worker is told of its device and its share."""
    monkeypatch.setattr(up, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(up, "meeting_folder", dict)

    def said(prefill: str = "", decode: str = "") -> list[str]:
        flags = {"prefill": prefill.split(), "decode": decode.split()}
        supervisor = Supervisor(UpConfig(model="m"), Overrides(flags=flags))
        supervisor.check_flags()
        supervisor._plan("path", ("name",))
        return list(supervisor._turns.described())

    assert not said("--device cpu")
    monkeypatch.setenv("TANDEM_DEVICE", "cuda")
    assert "0.9 of its memory is divided" in said()[0]
    assert "decode-0 may take what others leave" in said("--kv-cache-memory-bytes 9")[0]
    assert "prefill-0 may" in said(decode="--gpu-memory-utilization 0.5")[0]
    monkeypatch.setenv("TANDEM_NUM_GPU_BLOCKS_OVERRIDE", "100")
    assert not said()


def test_a_start_in_turns_has_its_time_from_the_last_one_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The second of two is not given up for what the first took; who ends is restarted in turn."""
    stack = Stack(["prefill", "decode"], ["0"], {})
    now, looks = 0.0, 0

    def wait(_: float) -> bool:
        nonlocal now, looks
        now, looks = now + 200.0, looks + 1
        for child in stack.children:  # whoever runs serves after a look
            assert isinstance(child, Actor)
            child.serves = child.runs
        return looks > 20

    monkeypatch.setattr(stack._stop, "wait", wait)
    monkeypatch.setattr(up, "time", SimpleNamespace(monotonic=lambda: now))
    stack._start_due()
    assert stack._wait_ready(0.0)
    said = capsys.readouterr().out
    assert said.count("ready after") == 2

    for child in stack.children:
        assert isinstance(child, Actor)
        child.end()
    assert stack._watch() == 0
    lines = [line.partition("| ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "prefill-0 ended with status 1",
        "decode-1 ended with status 1",
        "prefill-0 restarted",
        "decode-1 restarted",
    ]
