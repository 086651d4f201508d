"""The simulation of a stack: it ends, repeats itself, and is near what two H100s did."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench.sim import loads
from bench.sim.__main__ import arguments
from bench.sim.agents import Agents, agents
from bench.sim.figures import figures
from bench.sim.loads import Load, alone, mixed, trace, uniform
from bench.sim.router import Seen
from bench.sim.seeds import BOUNDED, PAIR, STRICT, over_seeds, table
from bench.sim.stack import SHAPES, Stack
from bench.sim.times import QWEN3_8B, Device, StepTimes

from tandem.engine.kv_memory import StepSize
from tandem.engine.scheduler.padding import Padding

RESULTS = Path(__file__).parents[2] / "bench" / "results"
KNOWN = json.loads((RESULTS / "pair_h100.json").read_text())


def run(shape: str, load: Load) -> list[Seen]:
    """What the clients of a new stack saw."""
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
    """To the last bit; another seed gives another."""
    first, again = (run("1P1D", uniform(12, 30, 1)) for _ in range(2))
    assert [each.times for each in first] == [each.times for each in again]
    other = run("1P1D", uniform(12, 30, 2))
    assert [each.times for each in first] != [each.times for each in other]


@pytest.mark.parametrize("tokens", [2048, 8192])
def test_prompts_alone_take_what_was_measured(tokens: int):
    """First tokens of one worker and of a pair within 10 %."""
    measured = KNOWN["one by one"]["times"][str(tokens)]["median"]
    for shape, name in (("two aggregated", "alone"), ("1P1D strict", "pair")):
        ttft = figures(run(shape, alone(tokens, 4))).ttft_p50
        assert ttft == pytest.approx(measured[f"ttft_{name}_ms"], rel=0.1)


def test_a_pair_under_load_does_what_was_measured():
    """First tokens and tokens at 18 a second within 15 %, for the same arrivals."""
    measured = KNOWN["load, default settings"]["18/s"]
    found = figures(run("1P1D strict", uniform(18, 360, 1)))
    assert found.ttft_p50 == pytest.approx(measured["ttft p50"], rel=0.15)
    assert found.ttft_p90 == pytest.approx(measured["ttft p90"], rel=0.15)
    assert found.tpot_p50 == pytest.approx(measured["tpot p50"], rel=0.15)


@pytest.mark.full
def test_placement_by_cost_serves_more_than_a_strict_pair_with_a_full_prefill_worker():
    """At 20 prompts a second, of which a prefill worker computes at most 21."""
    strict, by_cost = (
        figures(run(shape, uniform(20, 300, 1))) for shape in ("1P1D strict", "1P1D")
    )
    assert by_cost.goodput > strict.goodput


def test_a_trace_is_played_at_the_rate_that_is_asked_for(tmp_path: Path):
    """Whatever its own was; lengths are the trace's."""
    rows = [f"2023-11-16 18:15:{second:02d}.0000000,{100 + second},9" for second in range(20)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    seen = run("two aggregated", trace(path, 10.0, 20, 0))
    assert figures(seen).rate == pytest.approx(10, rel=0.15)
    assert sorted(each.num_prompt for each in seen) == [100 + second for second in range(20)]


def test_agents_come_back_to_what_is_cached():
    """Turns begin with what the last one ended with, so that little of them is new."""
    seen = run("1P1D strict", agents(Agents(4, seconds=20.0), 1))
    assert len(seen) > 10
    prompt = sum(each.num_prompt for each in seen)
    assert sum(each.new_tokens for each in seen) < 0.35 * prompt


def test_a_step_takes_longer_with_each_thing_it_holds():
    """Rows, their contexts, prompt tokens and what these look at."""
    times = StepTimes(QWEN3_8B, Device())
    base = times.seconds(10, 10_000, 500, 100_000)
    more = [(20, 10_000, 500, 100_000), (10, 50_000, 500, 100_000)]
    more += [(10, 10_000, 900, 100_000), (10, 10_000, 500, 900_000)]
    assert all(times.seconds(*each) > base for each in more)


def test_prompts_beside_decodes_cost_what_they_add_to_reading_weights():
    """Less than alone, and a few nearly nothing; padding costs what it stands beside, and what no
    graph holds the host's launches."""
    times = StepTimes(QWEN3_8B, Device())
    decodes, alone = times.seconds(20, 20_000, 0, 0), times.seconds(0, 0, 500, 0)
    both = times.seconds(20, 20_000, 500, 0)
    assert alone < both < decodes + 0.6 * alone
    assert times.seconds(20, 20_000, 64, 0) < 1.1 * decodes
    padded = StepTimes(QWEN3_8B, Device(), Padding([StepSize(64, 448, 8), StepSize(64, 576, 8)]))
    assert padded.seconds(20, 20_000, 449, 0) == padded.seconds(20, 20_000, 576, 0)
    assert padded.seconds(20, 20_000, 448, 0) < padded.seconds(20, 20_000, 449, 0)
    assert padded.seconds(20, 20_000, 577, 0) == Device().launch


@pytest.mark.full
def test_a_mixed_loads_goodput_is_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    """Of two bounded workers and of a strict pair, for the arrivals that two H100s had."""
    monkeypatch.setattr(loads, "SETTLE", 5.0)
    known = json.loads((RESULTS / "elastic_h100.json").read_text())
    for shape, name in ((BOUNDED, "two bounded"), (STRICT, "strict")):
        found = figures(mixed(14, 210, 1)(Stack(SHAPES[shape], seed=1))).goodput
        measured = known[f"mixed:14 {name}, e285c39, seed 1"]["goodput"]
        assert found == pytest.approx(measured, rel=0.15)


@pytest.mark.full
def test_placement_by_cost_serves_what_two_bounded_workers_do_from_the_first_second(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of the same arrivals; nobody's gaps are late while workers learn what their steps take."""
    monkeypatch.setattr(loads, "SETTLE", 5.0)
    (row,) = over_seeds([("mixed", 14.0)], [1, 2], 15.0, None)
    assert row.mean(PAIR) >= 0.98 * row.mean(BOUNDED)
    assert max(gaps for _, gaps in row.late) < 0.02
    assert table([row]).splitlines()[2].startswith("| mixed | 14 /s | ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--loads", "mixed"], "--loads: mixed, must be LOAD:RATE"),
        (["--loads", "other:10"], "--loads: other:10, must be LOAD:RATE"),
        (["--loads", "mixed:0"], "--loads: mixed:0, must be LOAD:RATE"),
        (["--loads", "mixed:1001"], "--loads: mixed:1001, must be LOAD:RATE"),
        (["--loads", "mixed:10", "--seeds", "1,x"], "--seeds: x, must be a whole number"),
        (["--loads", "trace:30"], "--trace: none, must be a CSV file"),
        (["--loads", "mixed:10", "--seconds", "0"], "--seconds: 0, must be 1 to 3600"),
    ],
)
def test_seeds_are_refused_by_name(
    given: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """What the command cannot run, and what it would take."""
    monkeypatch.setattr(sys, "argv", ["sim", "seeds", *given])
    with pytest.raises(SystemExit):
        arguments()
    assert said in capsys.readouterr().err


def test_seeds_are_read(monkeypatch: pytest.MonkeyPatch):
    """Loads with their rates, and whole numbers."""
    given = ["sim", "seeds", "--loads", "mixed:10,agents:16", "--seeds", "3,4"]
    monkeypatch.setattr(sys, "argv", given)
    args = arguments()
    assert args.loads == [("mixed", 10.0), ("agents", 16.0)]
    assert args.seeds == [3, 4]


def test_figures_count_requests_within_both_bounds():
    """One gap may be long, or a hundredth of them; nothing is summed up of nobody."""

    def seen(first: float, gaps: list[float]) -> Seen:
        times = [first]
        for gap in gaps:
            times.append(times[-1] + gap)
        return Seen(0.0, 10, 10, times=times)

    good, late = seen(0.2, [0.01] * 20), seen(0.4, [0.01] * 20)
    once, twice = seen(0.2, [0.03] + [0.01] * 20), seen(0.2, [0.01] * 20 + [0.03] * 2)
    several = [good, late, once, twice]
    for number, each in enumerate(several):
        each.sent += number
        each.times = [at + number for at in each.times]
    found = figures(several)
    assert found.goodput * 3.0 == pytest.approx(2)  # three seconds from first to last
    assert (found.late_first, found.late_gaps) == (0.25, 0.25)
    assert found.late_second == 0.25, "one whose first gap is the long one"
    with pytest.raises(ValueError, match="no request"):
        figures([])
