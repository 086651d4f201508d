"""The simulation of a stack: it ends, repeats itself, and is near what two H100s did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.sim import loads
from bench.sim.figures import figures
from bench.sim.loads import Load, mixed, uniform
from bench.sim.router import Seen
from bench.sim.seeds import BOUNDED, PAIR, STRICT, over_seeds, table
from bench.sim.stack import SHAPES, Stack

RESULTS = Path(__file__).parents[2] / "bench" / "results"
KNOWN = json.loads((RESULTS / "pair_h100.json").read_text())


def run(shape: str, load: Load) -> list[Seen]:
    return load(Stack(SHAPES[shape]))


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_every_request_gets_its_tokens(shape: str):
    """As many as it asked for, in the order of time, whatever the shape."""
    seen = run(shape, mixed(8, 40, 3))
    assert len(seen) == 40
    for each in seen:
        assert len(each.times) == len(each.tokens) > 0
        assert each.sent < each.times[0]
        assert each.times == sorted(each.times)


def test_a_seed_gives_the_same_run():
    first, again = (run("1P1D", uniform(12, 30, 1)) for _ in range(2))
    assert [each.times for each in first] == [each.times for each in again]
    other = run("1P1D", uniform(12, 30, 2))
    assert [each.times for each in first] != [each.times for each in other]


@pytest.mark.nightly
def test_a_pair_under_load_does_what_was_measured():
    """First tokens and tokens at 18 a second within 15 %, for the same arrivals."""
    measured = KNOWN["load, default settings"]["18/s"]
    found = figures(run("1P1D strict", uniform(18, 360, 1)))
    assert found.ttft_p50 == pytest.approx(measured["ttft p50"], rel=0.15)
    assert found.ttft_p90 == pytest.approx(measured["ttft p90"], rel=0.15)
    assert found.tpot_p50 == pytest.approx(measured["tpot p50"], rel=0.15)


@pytest.mark.nightly
def test_placement_by_cost_serves_more_than_a_strict_pair_with_a_full_prefill_worker():
    """At 20 prompts a second, of which a prefill worker computes at most 21."""
    strict, by_cost = (
        figures(run(shape, uniform(20, 300, 1))) for shape in ("1P1D strict", "1P1D")
    )
    assert by_cost.goodput > strict.goodput


@pytest.mark.nightly
def test_a_mixed_loads_goodput_is_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """Of two bounded workers and of a strict pair, for the arrivals that two H100s had."""
    monkeypatch.setattr(loads, "SETTLE", 5.0)
    known = json.loads((RESULTS / "elastic_h100.json").read_text())
    for shape, name in ((BOUNDED, "two bounded"), (STRICT, "strict")):
        found = figures(mixed(14, 210, 1)(Stack(SHAPES[shape], seed=1))).goodput
        measured = known[f"mixed:14 {name}, e285c39, seed 1"]["goodput"]
        assert found == pytest.approx(measured, rel=0.15)


@pytest.mark.nightly
def test_placement_by_cost_serves_what_two_bounded_workers_do_from_the_first_second(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of the same arrivals; nobody's gaps are late while workers learn what their steps take."""
    monkeypatch.setattr(loads, "SETTLE", 5.0)
    (row,) = over_seeds([("mixed", 14.0)], [1, 2], 15.0, None)
    assert row.mean(PAIR) >= 0.98 * row.mean(BOUNDED)
    assert max(gaps for _, gaps in row.late) < 0.02
    assert table([row]).splitlines()[2].startswith("| mixed | 14 /s | ")
