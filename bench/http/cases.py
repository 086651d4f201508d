"""Requests to a server over HTTP, and the figures of what its client saw.

Each case is one run of ``tandem bench serve``; three of them, with other prompts each, make a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Seen = dict[str, Any]
"""The JSON of ``tandem bench serve --result``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load and the figures that are read from it."""

    name: str
    streams: int
    prompts: int
    tokens_in: int
    tokens_out: int
    figures: dict[str, Callable[[Seen], float]]
    processes: int = 1

    def flags(self, seed: int) -> list[str]:
        """Return the flags of ``tandem bench serve``."""
        said = {
            "max-concurrency": self.streams,
            "num-prompts": self.prompts,
            "random-input-len": self.tokens_in,
            "random-output-len": self.tokens_out,
            "client-processes": self.processes,
            "seed": seed,
        }
        return [part for name, value in said.items() for part in (f"--{name}", str(value))]


def said(name: str) -> Callable[[Seen], float]:
    """A figure that the tool gives itself."""
    return lambda seen: float(seen[name])


def prompt_rate(seen: Seen) -> float:
    """Prompt tokens a second from the first request to the last first token."""
    last = max(each["times"][0] for each in seen["requests"])
    return float(sum(each["prompt_tokens"] for each in seen["requests"]) / last)


def steady_rate(seen: Seen) -> float:
    """Tokens a second while all streams run: from when each had its first token until the last
    request was sent."""
    requests = sorted(seen["requests"], key=lambda each: each["sent_at"])
    streams = seen["settings"]["max_concurrency"]
    begin = max(each["times"][0] for each in requests[:streams])
    end = requests[-1]["sent_at"]
    inside = sum(begin < at <= end for each in requests for at in each["times"])
    return inside / (end - begin) if end > begin else float("nan")


def decode_only_gap(seen: Seen) -> float:
    """Median ms between tokens while all streams decode and no prompt is computed."""
    requests = seen["requests"]
    begin = max(each["times"][0] for each in requests)
    end = min(each["times"][-1] for each in requests)
    gaps = [
        after - before
        for each in requests
        for before, after in zip(each["times"], each["times"][1:], strict=False)
        if before >= begin and after <= end
    ]
    return 1e3 * statistics.median(gaps) if gaps else float("nan")


GAP, GAP99 = said("median_itl_ms"), said("p99_itl_ms")
TTFT = said("median_ttft_ms")
CLOSED = {
    "tok/s": said("output_throughput"),
    "tok/s, all streams running": steady_rate,
    "ITL p50": GAP,
    "ITL p99": GAP99,
    "TTFT p50": TTFT,
}


def cases(scale: int = 1) -> list[Case]:
    """All of them; ``scale`` divides lengths and streams, to try the script without a GPU."""

    def case(name: str, streams: int, rounds: int, tokens: tuple[int, int], **more: Any) -> Case:
        few = max(1, streams // scale)
        long, out = (max(1, each // scale) for each in tokens)
        return Case(
            name=name,
            streams=few,
            prompts=few * rounds,
            tokens_in=long,
            tokens_out=out,
            processes=1 if few < 64 else few // 64,
            **more,
        )

    alone = {"TPOT p50": said("median_tpot_ms"), "ITL p50": GAP}
    found = [case("decode 1 at 512", 1, 3, (512, 256), figures=alone)]
    for length in (512, 2048, 8192, 30000):
        rounds = 7 if length < 30000 else 4
        found.append(case(f"prompt of {length}", 1, rounds, (length, 1), figures={"TTFT": TTFT}))
    rate = {"prompt tok/s": prompt_rate}
    found.append(case("prompts of 4096 in a row", 16, 4, (4096, 1), figures=rate))
    found.append(case("streams, 32", 32, 4, (1024, 256), figures=CLOSED))
    found.append(case("streams, 64", 64, 4, (1024, 256), figures=CLOSED))
    found.append(case("streams, 256", 256, 3, (1024, 256), figures=CLOSED))
    only = {"ITL p50": decode_only_gap}
    found.append(case("decode 256 at 1024", 256, 1, (1024, 256), figures=only))
    return found
