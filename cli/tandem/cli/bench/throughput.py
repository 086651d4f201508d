"""`tandem bench throughput`: measures an engine in this process with many prompts at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.base.settings import setting
from tandem.cli.bench.load import Ask, LoadConfig, asks
from tandem.cli.settings.command import check_place, parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import set_up_logging
from tandem.cli.settings.worker_settings import engine_config, engine_sections
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Output settings of the measurement."""

    output_json: str | None = setting(None, "JSON file to write.")

    def __post_init__(self) -> None:
        check_place("output_json", self.output_json)


def run(argv: list[str]) -> int:
    """Measure and print."""
    paced = frozenset({"request_rate"})
    sections = [
        Section("Result", ThroughputConfig),
        Section("Load", LoadConfig, paced),
        *engine_sections(frozenset({"seed"})),
    ]
    given = parse("bench throughput", __doc__ or "", sections, argv)
    set_up_logging("warning")
    output = ThroughputConfig(**given[ThroughputConfig]).output_json
    load = LoadConfig(**given[LoadConfig])
    if (longest := given[ModelConfig].get("max_model_len")) is not None:
        load = replace(load, max_model_len=longest)
    result = measure(load, given)
    for name, value in result.items():
        print(f"{name:24} {value:,.2f}" if isinstance(value, float) else f"{name:24} {value:,}")
    if output:
        Path(output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(load: LoadConfig, given: dict[type, dict[str, Any]]) -> dict[str, Any]:
    """Return requests and tokens per second, after one warm-up request."""
    from tandem.cli.bench.inprocess import TimedEngine

    todo, config = fitted(load, engine_config(given))
    engine = TimedEngine(config)
    try:
        engine.run([Ask(todo[0].prompt[::-1], min(4, todo[0].max_tokens))])
        timed = engine.run(todo)
    finally:
        engine.close()
    prompt_tokens = sum(len(ask.prompt) for ask in todo)
    return {
        "requests": len(todo),
        "input_tokens": prompt_tokens,
        "output_tokens": timed.num_tokens,
        "seconds": timed.whole,
        "requests_per_s": len(todo) / timed.whole,
        "output_tokens_per_s": timed.num_tokens / timed.whole,
        "total_tokens_per_s": (prompt_tokens + timed.num_tokens) / timed.whole,
    }


def fitted(load: LoadConfig, config: EngineConfig) -> tuple[list[Ask], EngineConfig]:
    """Return the requests, and an engine configuration for their context length.

    Raises InvalidParameter if one does not fit.
    """
    from tandem.cli.bench.inprocess import check_fits

    length = min(load.max_model_len, config.max_model_len)
    todo = asks(replace(load, max_model_len=length))
    longest = max(len(ask.prompt) + ask.max_tokens for ask in todo)
    check_fits(config, longest)
    return todo, config.with_(max_model_len=max(length, longest))
