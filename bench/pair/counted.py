"""Growth of metrics between two reads."""

from __future__ import annotations

from collections.abc import Mapping

Metrics = Mapping[str, float]
"""``name{labels}`` to value."""
WAYS = ("tandem:router_attempts_total", "tandem:router_forecast_error_seconds_count")
SPANS = {
    "prefill": "vllm:request_prefill_time_seconds",
    "queue": "vllm:request_queue_time_seconds",
}


def grown(before: Metrics, after: Metrics, name: str) -> float:
    """Return the growth of a series over all labels."""
    return sum(
        value - before.get(each, 0.0)
        for each, value in after.items()
        if each.partition("{")[0] == name
    )


def ways(before: Metrics, after: Metrics) -> dict[str, int]:
    """Return the prompts by way: attempts by shape and kind, and, where placement
    forecasts, first tokens by way."""
    found = {}
    for name, value in after.items():
        count = round(value - before.get(name, 0.0))
        if count and name.startswith(WAYS):
            found[name.partition("{")[2].rstrip("}").replace('"', "")] = count
    return found


def spans_ms(before: Metrics, after: Metrics) -> dict[str, float]:
    """Mean ms that a worker's prompts were computed for and waited before, by its own clock; 0
    where it had none."""
    found = {}
    for name, series in SPANS.items():
        count = grown(before, after, f"{series}_count")
        found[name] = 1e3 * grown(before, after, f"{series}_sum") / max(1.0, count)
    return found
