"""Shows and saves a result: a table, a JSON file, a plot of latencies over time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.cli.bench.client import Record
from tandem.cli.bench.summary import METRICS, NAMES
from tandem.cli.explained import plain
from tandem.protocol.errors import InvalidParameter

_COUNTS = {
    "completed": "Successful requests",
    "failed": "Failed requests",
    "max_concurrency_seen": "Most requests at once",
    "duration": "Duration (s)",
    "total_input_tokens": "Input tokens",
    "total_output_tokens": "Output tokens",
    "request_throughput": "Requests per second",
    "request_goodput": "Requests per second within the bounds",
    "output_throughput": "Output tokens per second",
    "total_token_throughput": "Input and output tokens per second",
}


def show(result: dict[str, Any]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    counts = Table(show_header=False, box=None, padding=(0, 2))
    for key, label in _COUNTS.items():
        if key in result:
            value = result[key]
            counts.add_row(label, f"{value:,}" if isinstance(value, int) else f"{value:,.2f}")
    console.print(counts)
    ranks = [key.split("_")[0] for key in result if key[0] == "p" and key.endswith("_ttft_ms")]
    latency = Table("ms", "mean", "median", *ranks, padding=(0, 1))
    for name in METRICS:
        if f"mean_{name}_ms" in result:
            keys = [f"{each}_{name}_ms" for each in ("mean", "median", *ranks)]
            latency.add_row(NAMES[name], *(f"{result[key]:,.2f}" for key in keys))
    console.print(latency)
    for message, count in result.get("errors", {}).items():
        console.print(Text.assemble((f"{count} x", "red"), " ", plain(message)))


def save(path: Path, result: dict[str, Any], records: Sequence[Record], *, detailed: bool) -> None:
    """Write the JSON; ``detailed`` adds the times of every request."""
    content = dict(result)
    if detailed:
        content["requests"] = [
            {
                "prompt_tokens": record.num_prompt,
                "output_tokens": record.num_tokens,
                "sent_at": record.sent_at,
                "times": record.times,
                "error": record.error,
            }
            for record in records
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def plot(path: Path, records: Sequence[Record]) -> None:
    """Plot time to first token and gaps between tokens over the run, in the format of the suffix.

    Raises InvalidParameter if matplotlib is not installed or the format is unknown.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        allowed = "a path, if matplotlib is installed: tandem-serving[bench]"
        raise InvalidParameter("plot", str(path), allowed) from error
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    first, gaps = figure.subplots(2, 1, sharex=True)
    good = [record for record in records if record.error is None]
    first.plot(
        [record.sent_at for record in good], [1000 * record.ttft for record in good], ".", ms=4
    )
    first.set_ylabel("time to first token (ms)")
    gaps.plot(
        [at for record in good for at in record.times[1:]],
        [1000 * gap for record in good for gap in record.itl],
        ",",
    )
    gaps.set_ylabel("gap between tokens (ms)")
    gaps.set_xlabel("seconds after the start")
    for axes in (first, gaps):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise InvalidParameter("plot", str(path), f"a format of matplotlib ({error})") from error
