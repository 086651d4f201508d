"""Elastic roles with real processes: whoever is cheapest serves, and tokens are those of others."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from conftest import StackMaker
from stack import Stack
from test_tokens import check

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

ELASTIC = ["--no-strict-handoff", "--target-ttft-ms", "5000", "--target-itl-ms", "500"]
"""With bounds of a CPU: beyond those of a GPU each way is as bad as another."""
MANY = tuple(range(0, 34, 3))
"""Prompts of many lengths, up to 248 tokens."""

TURNS = 3
"""Of the same prompts at most: a machine that was busy while it was measured makes forecasts by
which another way is cheaper."""


def ways(stack: Stack) -> list[dict[str, Any]]:
    """What was chosen for the latest attempts, where it was forecast."""
    with urllib.request.urlopen(f"{stack.url}/debug/placements", timeout=5) as answer:
        placements = json.load(answer)["placements"]
    return [way for each in placements for way in each["ways"] if way["chosen"]]


@pytest.mark.nightly
async def test_each_way_gives_the_reference_tokens(start_stack: StackMaker) -> None:
    """Prompts of many lengths at once, twice: P is held busy by some, so that others go to D alone;
    the second time most is cached there."""
    with start_stack(router_flags=ELASTIC) as stack:
        await check(stack, MANY)
        await check(stack, MANY)
        taken = {way["way"] for way in ways(stack)}
        assert "decode" in taken
        assert stack.total("router", "tandem:router_forecast_error_seconds_count") > 0


@pytest.mark.nightly
async def test_a_prefill_worker_decodes_on_where_decode_workers_are_full(
    start_stack: StackMaker,
) -> None:
    """D takes no queue at all, and P goes on with what it has computed; D alone takes what it has
    cached."""
    flags = {"router_flags": ELASTIC, "worker_flags": ["--max-num-seqs", "2"]}
    with start_stack(**flags) as stack:
        await check(stack, MANY[:4])
        asked, seen = 4, set[str]()
        for _ in range(TURNS):
            await check(stack, MANY)
            asked += len(MANY)
            seen |= {way["way"] for way in ways(stack)}
            if {"prefill", "decode"} <= seen:
                break
        assert {"prefill", "decode"} <= seen
        assert stack.total("router", "tandem:router_forecast_error_seconds_count") > 0
        assert stack.total("prefill-0", "vllm:generation_tokens_total") > asked
