"""What steps ask of a device, against numbers counted by hand and by a model's own layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import FACTS, Clock, config_of, params_of, request_of
from tests.engine_plan.test_metrics import engine_of, run, value

from tandem.engine.core.step_notes import StepCost, StepCosts
from tandem.engine.metrics import EngineMetrics, peak_of
from tandem.engine.step import SchedulerOutput, SeqId, StepRow

LINEAR = 8 * (4 * 8) + 3 * 8 * 16
"""Weights of the builders' one layer: q, k, v, o of 8 by 8, and an MLP of 16."""
HEAD = 8 * 50


def costs_of(**changes: Any) -> StepCosts:
    """Of the builders' model: one layer, one head of 8, float32."""
    config = config_of()
    return StepCosts(replace(FACTS, **changes), config.layout, "float32")


def step(*rows: tuple[int, int, bool]) -> SchedulerOutput:
    """(tokens before, tokens, whether it draws) of each row."""
    made = (
        StepRow(SeqId(number), before, count, sample_choices=(0,) if draws else ())
        for number, (before, count, draws) in enumerate(rows)
    )
    return SchedulerOutput(0, tuple(made))


def test_a_chunk_and_a_decode() -> None:
    """Twice the weights for a token, four times the head's width for a pair; KV of 64 bytes."""
    found = costs_of().of(step((10, 1, True), (0, 3, False)))
    assert found.flops == 2 * (4 * LINEAR + HEAD) + 4 * 8 * (11 + 1 + 2 + 3)
    assert found.read_bytes == 4 * (LINEAR + HEAD) + 10 * 64
    assert found.write_bytes == 4 * 64


def test_a_step_without_rows_costs_nothing() -> None:
    assert costs_of().of(step()) == StepCost(0, 0, 0)


@pytest.mark.parametrize("before", [0, 1, 3, 4, 9])
def test_a_window_bounds_what_a_token_sees(before: int) -> None:
    found = costs_of(sliding_window=4).of(step((before, 6, False)))
    seen = sum(min(4, position + 1) for position in range(before, before + 6))
    assert found.flops == 2 * 6 * LINEAR + 32 * seen
    assert found.read_bytes == 4 * LINEAR + min(before, 4) * 64


def test_steps_are_counted() -> None:
    """A prompt of 20 and four tokens: what the steps cost, all together."""
    registry, clock = CollectorRegistry(), Clock()
    core = engine_of(registry, clock, enable_prefix_caching=False, async_scheduling=False)
    core.add(request_of("a", 20, params=params_of(max_tokens=4, ignore_eos=True)))
    run(core, clock)
    tokens, pairs = 20 + 3, sum(range(1, 24))
    flops = 2 * (tokens * LINEAR + 4 * HEAD) + 32 * pairs
    assert value(registry, "vllm:estimated_flops_per_gpu_total") == flops
    assert value(registry, "vllm:estimated_write_bytes_per_gpu_total") == tokens * 64
    assert value(registry, "vllm:estimated_read_bytes_per_gpu_total") == (
        4 * 4 * (LINEAR + HEAD) + (20 + 21 + 22) * 64
    )


def test_peaks_are_of_devices_that_are_known() -> None:
    """By the driver's names; an L40S is no L4, and a CPU has none."""
    h200, h100 = peak_of("NVIDIA H200"), peak_of("NVIDIA H100 80GB HBM3")
    assert h200 is not None
    assert h100 is not None
    assert h200.bytes_per_s > h100.bytes_per_s
    assert peak_of("NVIDIA L40S") != peak_of("NVIDIA L4")
    assert peak_of("NVIDIA H100 PCIe") != h100
    assert peak_of("") is peak_of("NVIDIA GeForce 256") is None


@pytest.mark.parametrize(("name", "there"), [("NVIDIA H200", 4.8e12), ("", None)])
def test_the_peak_is_a_series_where_there_is_one(name: str, there: float | None) -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name="tiny", max_model_len=10)
    metrics.set_device(name)
    assert value(registry, "tandem:device_peak_bytes_per_second") == there
