"""Workers that share a GPU and were told how much they take find that, again and again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.cli.acted_stack import ROLES, Actor, Stack

from tandem.cli.serve import gpus, up
from tandem.cli.serve.child_flags import ChildFlagsError
from tandem.cli.serve.overrides import Overrides
from tandem.cli.serve.stack import UpConfig
from tandem.cli.serve.up import Supervisor
from tandem.engine.config import EngineConfig
from tandem.engine.worker import worker


@pytest.mark.parametrize(
    ("told", "top"),
    [({}, 0.9), ({"prefill": 0.4}, 0.9), ({"prefill": 0.4, "decode": 0.7}, 0.7)],
)
def test_whoever_starts_again_gets_as_much_as_it_had(
    told: dict[str, float], top: float, smollm2: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of a device of 24 GiB with weights of one, and 256 MiB for steps, where the model wants more;
    by a worker's own count, which is the same for two that were told nothing."""
    total, weights, step = 24 << 30, 1 << 30, 256 << 20
    given = {role: {"gpu_memory_utilization": share} for role, share in told.items()}
    stack = Stack(["prefill", "decode"], ["0"], given)
    taken = dict.fromkeys(["prefill-0", "decode-1"], 0)
    blocks: dict[str, list[int]] = {name: [] for name in taken}

    def left(_: object) -> tuple[int, int]:
        return total - sum(taken.values()), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", left)
    for number in (0, 1, 0, 1):
        child = stack.children[number]
        assert isinstance(child, Actor)
        if blocks[child.name]:
            stack.end(number)
        taken[child.name] = 0
        assert stack.step() == [child.name]
        taken[child.name] = weights
        share = float(stack.shares()[number] or told[child.arguments[0]])
        config = EngineConfig.of(smollm2, device="cuda", gpu_memory_utilization=share)
        count = worker.num_blocks(config, config.layout, torch.device("cuda"), step_bytes=step)
        blocks[child.name].append(count)
        taken[child.name] += step + count * config.layout.block_bytes
        child.serves = True
    prefill, decode = blocks.values()
    assert prefill[0] == prefill[1]
    assert decode[0] == decode[1]
    assert (prefill == decode) == (not told)
    assert sum(taken.values()) == pytest.approx(top * total, rel=0.01)


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


def test_of_two_that_were_told_a_share_the_lower_goes_first():
    """The other way round it would find more taken than it was told."""
    given = {"prefill": {"gpu_memory_utilization": 0.8}, "decode": {"gpu_memory_utilization": 0.4}}
    stack = Stack(["prefill", "decode"], ["0"], given)
    assert stack.step() == ["decode-1"]
    assert stack.step(1) == ["prefill-0"]


def test_the_others_divide_what_a_told_share_leaves():
    """However much that is; a third of all, at 0.7, would be less than is taken."""
    given = {"prefill": {"gpu_memory_utilization": 0.7}}
    stack = Stack(["prefill", "decode", "decode"], ["0"], given)
    assert stack.step() == ["prefill-0"]
    assert stack.step(0) == ["decode-1"]
    assert stack.step(1) == ["decode-2"]
    assert stack.shares() == [None, "0.8000", "0.9000"]


@pytest.mark.parametrize(
    ("used", "shares"), [(0.7, ["0.8000"]), (0.1, ["0.5000"]), (None, ["0.6000"])]
)
def test_the_others_divide_what_told_bytes_leave(
    used: float | None, shares: list[str], monkeypatch: pytest.MonkeyPatch
):
    """As the driver says it once their owner serves; where it does not, that counts as a third."""
    asked: list[str] = []

    def says(gpu: str) -> float | None:
        asked.append(gpu)
        return used

    monkeypatch.setattr(gpus, "used_share", says)
    given = {"prefill": {"kv_cache_memory_bytes": 1 << 30}}
    stack = Stack(["prefill", "decode", "decode"], ["7"], given)
    assert stack.step() == ["prefill-0"]
    assert not asked
    assert stack.step(0) == ["decode-1"]
    assert stack.step(1) == ["decode-2"]
    assert stack.shares() == [None, *shares, "0.9000"]
    assert asked == ["7"]


def test_a_told_share_is_kept_free_for_its_owner():
    """Alone it takes what the others leave; of those that end with it, it leaves the parts."""
    given = {"prefill": {"gpu_memory_utilization": 0.3}}
    stack = Stack(["prefill", "decode", "decode"], ["0"], given)
    for number in range(3):
        stack.step(*range(number))
    assert stack.step(2) == []
    assert stack.shares() == [None, "0.6000", "0.9000"]
    stack.end(0)
    assert stack.step() == ["prefill-0"]
    assert stack.shares()[0] == "0.9000"
    stack.end(1, 0)
    assert stack.step() == ["prefill-0"]
    assert stack.step(0) == ["decode-1"]
    assert stack.shares() == ["0.6000", "0.9000", "0.9000"]
    assert stack.children[0].arguments == ["prefill", "--gpu-memory-utilization", "0.6000"]


def test_who_was_told_bytes_goes_first_again():
    """Where both ended: else the other would take the memory for these."""
    stack = Stack(["prefill", "decode"], ["0"], {"decode": {"kv_cache_memory_bytes": 100}})
    assert stack.step() == ["decode-1"]
    assert stack.step(1) == ["prefill-0"]
    stack.end(0, 1)
    assert stack.step() == ["decode-1"]
    assert stack.step(1) == ["prefill-0"]


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


ABOVE_ALL = (
    "flags of prefill workers: gpu_memory_utilization: 0.95 is not allowed; less than 0.9 on GPU "
    "0: decode-0, without a share, may take what it leaves of 0.9, and nothing is left"
)
EQUAL = (
    "flags of decode workers: gpu_memory_utilization: 0.5 is not allowed; more than 0.5 on GPU 0: "
    "it counts what prefill-0 holds there, which may fill as much, and nothing is left for "
    "decode-0; without shares 0.9 is divided"
)


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [("0.95", "", ABOVE_ALL), ("0.5", "0.5", EQUAL), ("0.5", "", ""), ("0.95", "0.5", "")],
)
def test_shares_that_leave_a_worker_nothing_are_refused(
    prefill: str, decode: str, said: str, monkeypatch: pytest.MonkeyPatch
):
    """Before the model is prepared: it would end at its start. On a GPU for each, none are."""
    shares = {"prefill": prefill, "decode": decode}
    flags = {
        role: ["--device", "cuda", *(["--gpu-memory-utilization", share] if share else [])]
        for role, share in shares.items()
    }
    stack = partial(Supervisor, UpConfig(model="m"), Overrides(flags=flags))
    monkeypatch.setattr(up, "visible_gpus", lambda: ["0", "1"])
    stack().check_flags()
    monkeypatch.setattr(up, "visible_gpus", lambda: ["0"])
    if not said:
        stack().check_flags()
        return
    with pytest.raises(ChildFlagsError) as caught:
        stack().check_flags()
    assert str(caught.value) == said
