"""Workers of a local stack that share a GPU start in turn, each with its part of the memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch

from tandem.cli import up
from tandem.cli.children import Child
from tandem.cli.gpu_turns import ENV_SHARE, Turns, sharers
from tandem.cli.up import Supervisor
from tandem.cli.up_config import UpConfig
from tandem.engine.config import EngineConfig
from tandem.engine.worker import capacity

ROLES: Mapping[str, Mapping[str, object]] = {"prefill": {}, "decode": {}}
CUDA = {"device": "cuda"}


class Actor(Child):
    """No process: it runs from its start on, serves when it is told to, and can end."""

    runs = False
    serves = False
    ended = False

    def start(self, log: TextIO) -> None:
        """Noted."""
        self.runs, self.ended, self.serves, self.ready = True, False, False, False
        self.started = time.monotonic()

    def end(self) -> None:
        """Its process has ended."""
        self.runs, self.ended = False, True

    @property
    def is_running(self) -> bool:
        """From its start to its end."""
        return self.runs

    @property
    def exit_code(self) -> int | None:
        """1 after its end."""
        return 1 if self.ended else None

    def check_ready(self) -> bool:
        """As told."""
        self.ready = self.serves and self.runs
        return self.ready


class Stack(Supervisor):
    """A supervisor of actors on GPUs of the test's choice."""

    def __init__(
        self, roles: Sequence[str], gpus: Sequence[str], told: Mapping[str, Mapping[str, object]]
    ) -> None:
        super().__init__(UpConfig(model="m", ready_seconds=300.0))
        self.children = [Actor(f"{role}-{at}", [role], "") for at, role in enumerate(roles)]
        given = {role: {**CUDA, **told.get(role, {})} for role in ("prefill", "decode")}
        self._turns = Turns(sharers(self.children, gpus, given), patience=300.0)
        self._due = list(self.children)

    def step(self, *serving: int) -> list[str]:
        """Which are started, once those with the numbers serve."""
        for number in serving:
            child = self.children[number]
            assert isinstance(child, Actor)
            child.serves = True
        return [child.name for child in self._start_due()]

    def shares(self) -> list[str | None]:
        """Of each child, as it was told."""
        return [child.environment.get(ENV_SHARE) for child in self.children]


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


def test_the_parts_are_equal_by_a_workers_own_count(smollm2: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a device of 24 GiB with weights of one, and 256 MiB for steps, where the model wants more;
    whoever starts again gets as much as it had."""
    total, weights, step = 24 << 30, 1 << 30, 256 << 20
    stack = Stack(["prefill", "decode"], ["0"], {})
    taken = dict.fromkeys(["prefill-0", "decode-1"], 0)
    blocks: dict[str, list[int]] = {name: [] for name in taken}

    def left(_: object) -> tuple[int, int]:
        return total - sum(taken.values()), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    for again in (False, True):
        for child in stack.children if not again else stack.children[:1]:
            assert isinstance(child, Actor)
            if again:
                child.end()
                stack._due.append(child)
            taken[child.name] = 0
            assert stack.step() == [child.name]
            taken[child.name] = weights
            share = float(child.environment[ENV_SHARE])
            config = EngineConfig.of(smollm2, device="cuda", gpu_memory_utilization=share)
            cuda = torch.device("cuda")
            count = capacity.num_blocks(config, config.layout, cuda, step_bytes=step)
            blocks[child.name].append(count)
            taken[child.name] += step + count * config.layout.block_bytes
            child.serves = True
    assert blocks["prefill-0"] == [*blocks["decode-1"], *blocks["decode-1"]]
    assert sum(taken.values()) == pytest.approx(0.9 * total, rel=0.01)


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
    for number in (0, 1):
        child = stack.children[number]
        assert isinstance(child, Actor)
        child.end()
        stack._due.append(child)
    assert stack.step() == ["prefill-0"]
    assert stack.step(0) == ["decode-1"]
    assert stack.shares() == ["0.6000", "0.9000", "0.9000"]


def test_who_never_serves_is_not_waited_for_without_end():
    """As long as a stack waits for it."""
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


def test_a_share_that_was_given_stands():
    """Its owner still takes its turn, since the share counts what the other took."""
    given = {"prefill": {"gpu_memory_utilization": 0.4}, "decode": {"gpu_memory_utilization": 0.8}}
    stack = Stack(["prefill", "decode"], ["0"], given)
    assert stack.step() == ["prefill-0"]
    assert stack.step(0) == ["decode-1"]
    assert stack.shares() == [None, None]
    (said,) = stack._turns.described()
    assert said == (
        "prefill-0, decode-1 share GPU 0 and start one after the other (--gpu-memory-utilization)"
    )


def test_who_was_told_its_share_goes_before_who_was_not():
    """Then the other's part is what is left, and not what the first finds taken."""
    stack = Stack(["prefill", "decode"], ["0"], {"decode": {"gpu_memory_utilization": 0.5}})
    assert stack.step() == ["decode-1"]
    assert stack.step(1) == ["prefill-0"]
    assert stack.shares() == ["0.9000", None]


@pytest.mark.parametrize("name", ["kv_cache_memory_bytes", "num_gpu_blocks_override"])
def test_who_was_told_its_memory_starts_at_once(name: str):
    """And before who takes what is left; two of them know no turns."""
    stack = Stack(["prefill", "decode"], ["0"], {"decode": {name: 100}})
    assert stack.step() == ["decode-1"]
    assert stack.step(1) == ["prefill-0"]
    assert stack.shares() == ["0.9000", None]
    assert "prefill-0 may take what others leave of 0.9" in next(stack._turns.described())
    stack = Stack(["prefill", "decode"], ["0"], {role: {name: 100} for role in ROLES})
    assert stack.step() == ["prefill-0", "decode-1"]
    assert not list(stack._turns.described())


def test_flags_and_environment_reach_the_turns(monkeypatch: pytest.MonkeyPatch):
    """Whatever way a worker is told of its device and its share."""
    monkeypatch.setattr(up, "visible_gpus", lambda: ["0"])
    monkeypatch.setattr(up, "meeting_folder", dict)

    def said(prefill: str = "", decode: str = "") -> list[str]:
        supervisor = Supervisor(UpConfig(model="m", prefill_flags=prefill, decode_flags=decode))
        supervisor.check_flags()
        supervisor._plan("path", "name")
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
