"""`tandem bench latency`: one batch on an engine in this process, again and again."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.base.settings import check_integer, setting
from tandem.cli.bench.load import LoadConfig, asks
from tandem.cli.settings.command import check_place, parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import set_up_logging
from tandem.cli.settings.worker_settings import engine_config, engine_sections

_WARMUPS = 2
"""Runs before the measured ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyConfig:
    """The batch and how often it runs."""

    batch_size: int = setting(8, "Number of concurrent requests.", unit="requests")
    input_len: int = setting(32, "Prompt length.", unit="tokens")
    output_len: int = setting(128, "Answer length.", unit="tokens")
    num_iters: int = setting(5, "Number of measured runs.")
    output_json: str | None = setting(None, "JSON file to write.")

    def __post_init__(self) -> None:
        check_place("output_json", self.output_json)
        for name in ("batch_size", "input_len", "output_len", "num_iters"):
            check_integer(name, getattr(self, name), 1)


def run(argv: list[str]) -> int:
    """Measure and print."""
    sections = [Section("Batch", LatencyConfig), *engine_sections()]
    given = parse("bench latency", __doc__ or "", sections, argv)
    config = LatencyConfig(**given[LatencyConfig])
    set_up_logging("warning")
    result = measure(config, given)
    for name in ("first_token_s", "per_token_s", "whole_s"):
        values = ", ".join(f"{value:.4f}" for value in result[name])
        print(f"{name:14} median {statistics.median(result[name]):.4f}  ({values})")
    if config.output_json:
        Path(config.output_json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(config: LatencyConfig, given: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """Return the times of each measured run. Each has its own prompts, so nothing is cached."""
    from tandem.cli.bench.inprocess import TimedEngine, check_fits

    started = time.perf_counter()
    built = engine_config(given)
    check_fits(built, config.input_len + config.output_len)
    engine = TimedEngine(built)
    load_seconds = time.perf_counter() - started
    try:
        runs = []
        for number in range(_WARMUPS + config.num_iters):
            load = LoadConfig(
                num_prompts=config.batch_size,
                random_input_len=config.input_len,
                random_output_len=config.output_len,
                seed=number,
            )
            runs.append(engine.run(asks(load)))
    finally:
        engine.close()
    measured = runs[_WARMUPS:]
    steps = max(1, config.output_len - 1)
    return {
        "batch_size": config.batch_size,
        "input_len": config.input_len,
        "output_len": config.output_len,
        "load_s": load_seconds,
        "first_token_s": [each.first for each in measured],
        "per_token_s": [(each.whole - each.first) / steps for each in measured],
        "whole_s": [each.whole for each in measured],
    }
