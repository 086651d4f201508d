"""Who counts pulls while workers are hurt sees all of a worker's lives, and that nothing came."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from stack import Stack
from tests.chaos.pulls import PullWatch
from tests.chaos.schedule import LINK_KINDS, Kind, make_schedule

CAME = "tandem:kv_prefix_pulls_total"
TIMEOUT = 'tandem:kv_prefix_pull_fallbacks_total{reason="timeout"}'


class Workers:
    """A stack's faces towards a watch: processes, and what they count."""

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {
            f"decode-{number}": SimpleNamespace(process=SimpleNamespace(pid=number))
            for number in range(2)
        }
        self.counted = {name: {CAME: 5.0, TIMEOUT: 2.0, "other": 9.0} for name in self.workers}
        self.down: set[str] = set()

    def metrics(self, name: str) -> dict[str, float]:
        """As a stack's; one that is down does not answer."""
        if name in self.down:
            raise ConnectionRefusedError
        return self.counted[name]


def watched() -> tuple[Workers, PullWatch]:
    """Two workers that pulled before anybody looked."""
    workers = Workers()
    watch = PullWatch(cast("Stack", workers))
    watch.start()
    return workers, watch


def test_a_run_without_a_pull_is_a_problem() -> None:
    """Whatever was counted before it."""
    _, watch = watched()
    watch.stop()
    assert (watch.came, watch.fell_back) == (0, {})
    assert watch.problems() == ["no prefix was pulled: 0 prefixes pulled, 0 computed after all"]


def test_what_a_killed_worker_counted_stays() -> None:
    """Its next life begins at nothing, and adds to that."""
    workers, watch = watched()
    workers.counted["decode-0"] = {CAME: 8.0, TIMEOUT: 3.0}
    watch.look()
    workers.down.add("decode-0")
    watch.look()
    workers.down.clear()
    workers.workers["decode-0"].process = SimpleNamespace(pid=7)
    workers.counted["decode-0"] = {CAME: 2.0, TIMEOUT: 0.0}
    watch.stop()
    assert watch.came == 3 + 2
    assert watch.fell_back == {"timeout": 1}
    assert str(watch) == "5 prefixes pulled, 1 computed after all (timeout 1)"
    assert not watch.problems()


def test_whoever_lends_is_hurt_as_well() -> None:
    """Memory and links of decode workers are, too, where prefixes are pulled, and only there."""
    kinds = (*LINK_KINDS, Kind.FLIP)
    hand_offs = make_schedule(3, 4000, every=5, kinds=kinds).faults
    pulls = make_schedule(3, 4000, every=5, kinds=kinds, pulls=True).faults
    assert {fault.role for fault in hand_offs} == {"link", "prefill"}
    assert {fault.role for fault in pulls} == {"link", "prefill", "decode"}
    assert {fault.worker for fault in hand_offs if fault.role == "link"} == {0, 1}
    assert {fault.worker for fault in pulls if fault.role == "link"} == {0, 1, 2, 3}
