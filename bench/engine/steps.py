"""Measure the engine's steps: decodes by batch and context, prompts alone, prompts in a row."""

from __future__ import annotations

import statistics
import time
from typing import Any

from rig import GREEDY, SAMPLED, Rig

DECODES = ((1, 512), (1, 8192), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024))
PROMPTS = (512, 2048, 8192, 30000)
LEAST_PROMPTS, MOST_PROMPTS = 5, 60
PROMPT_TOKENS = 30_000
"""As many prompts of a length as have so many tokens together, within those bounds."""
STEPS = 48
RUNS = 3


def decode(rig: Rig, batch: int, context: int, *, sampled: bool = False) -> dict[str, Any]:
    """ms a step of ``batch`` sequences around ``context`` tokens, and the host's ms of it."""
    warm, total = 6, STEPS * RUNS
    params = SAMPLED if sampled else GREEDY
    rig.gather(batch, context, total + 4 * warm + batch, params)
    for _ in range(warm):
        rig.step()
    runs, hosts = [], []
    rig.parts.clear()
    for _ in range(RUNS):
        started = time.perf_counter()
        with rig.host_seconds() as host:
            for _ in range(STEPS):
                rig.step()
        runs.append((time.perf_counter() - started) / STEPS * 1e3)
        hosts.append(host[0] / STEPS * 1e3)
    rig.abort_all()
    return {
        "batch": batch,
        "context": context,
        "sampled": sampled,
        "ms": statistics.median(runs),
        "runs_ms": runs,
        "host_ms": statistics.median(hosts),
        "host_parts_ms": {k: round(v / total * 1e3, 3) for k, v in rig.parts.items()},
    }


def first_token_ms(rig: Rig, length: int) -> float:
    """Return the milliseconds from a prompt's arrival at an idle engine to its first token."""
    started = time.perf_counter()
    rig.add(length, 1)
    while not rig.step().outputs:
        pass
    elapsed = (time.perf_counter() - started) * 1e3
    rig.drain()
    return elapsed


def prompt(rig: Rig, length: int, runs: int | None = None) -> dict[str, Any]:
    """Some of ``first_token_ms``, the first left out: more of short prompts, since single ones of
    512 tokens differ by 7 % as the GPU's clock does."""
    if runs is None:
        runs = min(MOST_PROMPTS, max(LEAST_PROMPTS, PROMPT_TOKENS // length))
    found = [first_token_ms(rig, length) for _ in range(runs + 1)]
    return {"tokens": length, "ms": statistics.median(found[1:] or found), "runs_ms": found[1:]}


def closed(rig: Rig, streams: int, *, turns: float = 2.0) -> dict[str, Any]:
    """``streams`` requests at a time, 1k in and 256 out: tokens a second, and gaps between them.

    The first of each stream draws fewer tokens, so that streams do not end together. Counting
    begins when each has its first token and ends when the last request begins.
    """
    left = int(streams * turns)
    for number in range(streams):
        rig.add(1024, 1 + 255 * (number + 1) // streams)
    last: dict[str, float] = {}
    gaps: list[float] = []
    begun, tokens, started, elapsed = 0, 0, 0.0, 1.0
    while rig.core.has_work:
        outputs = [each for some in rig.step().outputs.values() for each in some]
        now = time.perf_counter()
        if started and left > 0:
            tokens, elapsed = tokens + len(outputs), now - started
        for each in outputs:
            if each.request not in last:
                begun += 1
            elif started and left > 0:
                gaps.append(now - last[each.request])
            last[each.request] = now
            if each.finish is not None and left > 0:
                left -= 1
                rig.add(1024, 256)
        if begun >= streams and not started:
            started = now
    gaps.sort()
    at = {p: gaps[int(len(gaps) * p / 100)] * 1e3 for p in (50, 90, 99)}
    return {
        "streams": streams,
        "tokens_per_s": tokens / elapsed,
        "seconds": elapsed,
        **{f"gap_p{p}_ms": value for p, value in at.items()},
    }


def whole(rig: Rig, streams: int, requests: int) -> dict[str, Any]:
    """Tokens a second of ``requests`` requests, 1k in and 256 out, ``streams`` at a time, from the
    arrival of the first to the end of the last: with the burst of prompts at the start."""
    started = time.perf_counter()
    for _ in range(min(streams, requests)):
        rig.add(1024, 256)
    left, tokens = requests - streams, 0
    while rig.core.has_work:
        for each in (each for some in rig.step().outputs.values() for each in some):
            tokens += len(each.token_ids)
            if each.finish is not None and left > 0:
                left -= 1
                rig.add(1024, 256)
    seconds = time.perf_counter() - started
    return {
        "streams": streams,
        "requests": requests,
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
    }


def saturated(rig: Rig, length: int = 4096, count: int = 48) -> dict[str, Any]:
    """Prompt tokens a second when prompts of ``length`` never run out."""
    rates = []
    for _ in range(RUNS):
        for _ in range(count):
            rig.add(length, 1)
        started = time.perf_counter()
        rig.drain()
        rates.append(length * count / (time.perf_counter() - started))
    return {"tokens": length, "tokens_per_s": statistics.median(rates), "runs": rates}
