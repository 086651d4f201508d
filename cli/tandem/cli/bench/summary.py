"""Records to figures: counts, throughput, percentiles, and the share within given bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tandem.cli.bench.client import Record
from tandem.protocol.errors import InvalidParameter

METRICS = ("ttft", "tpot", "itl", "e2el")
NAMES = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (without the first)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """Return bounds in ms by metric, from ``ttft:200`` and so on. Raises InvalidParameter."""
    bounds = {}
    for each in given:
        name, colon, value = each.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not colon:
            raise InvalidParameter("goodput", each, "ttft:MS, tpot:MS or e2el:MS")
        try:
            bounds[name] = float(value)
        except ValueError as error:
            raise InvalidParameter("goodput", each, "ttft:MS, tpot:MS or e2el:MS") from error
    return bounds


def summarize(
    records: Sequence[Record],
    seconds: float,
    *,
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> dict[str, Any]:
    """Return the result that is printed and saved; times in milliseconds."""
    good = [record for record in records if record.error is None]
    tokens = sum(record.num_tokens for record in good)
    prompts = sum(record.num_prompt for record in good)
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(records) - len(good),
        "duration": seconds,
        "total_input_tokens": prompts,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / seconds,
        "output_throughput": tokens / seconds,
        "total_token_throughput": (prompts + tokens) / seconds,
        "max_concurrency_seen": _most_at_once(good),
    }
    if goodput:
        within = sum(_is_within(record, goodput) for record in good)
        result["request_goodput"] = within / seconds
        result["share_within_bounds"] = within / max(1, len(records))
    for name in METRICS:
        values = _values(good, name)
        if values.size:
            result |= _spread(name, values, percentiles)
    errors: dict[str, int] = {}
    for record in records:
        if record.error is not None:
            errors[record.error] = errors.get(record.error, 0) + 1
    return result | ({"errors": errors} if errors else {})


def _values(
    records: Sequence[Record], name: str
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    if name == "itl":
        found = [gap for record in records for gap in record.itl]
    elif name == "tpot":
        found = [record.tpot for record in records if record.tpot is not None]
    else:
        found = [record.ttft if name == "ttft" else record.e2e for record in records]
    return np.asarray(found, dtype=np.float64) * 1000


def _spread(
    name: str,
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    percentiles: Sequence[float],
) -> dict[str, float]:
    spread = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    for rank in percentiles:
        spread[f"p{rank:g}_{name}_ms"] = float(np.percentile(values, rank))
    return spread


def _is_within(record: Record, bounds: Mapping[str, float]) -> bool:
    tpot = record.tpot
    if tpot is None:  # a single token has no time between tokens that could be too long
        tpot = 0.0 if record.num_tokens == 1 else math.inf
    times = {"ttft": record.ttft, "tpot": tpot, "e2el": record.e2e}
    return all(1000 * times[name] <= bound for name, bound in bounds.items())


def _most_at_once(records: Sequence[Record]) -> int:
    steps = [(record.sent_at, 1) for record in records]
    steps += [(record.times[-1], -1) for record in records]
    most = now = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most
