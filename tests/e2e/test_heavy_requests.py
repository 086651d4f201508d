"""Beside requests that cost much to look at, running streams go on: no worker is taken for lost."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from client import Answer, stream
from heavy_requests import named, of_any_size
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

COMPUTED = ("256 prompts", "n=128")
"""What is no cost of looking but of computing: the workers' own, and long on two cores."""
SCORED = "echo, logprobs"
"""As many scores of a prompt of 1,500 tokens, computed anew, as "prompt_logprobs" asks for."""
STREAMS = range(4)
"""Rows."""


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param((*COMPUTED, SCORED), marks=pytest.mark.nightly, id="scored once"),
        pytest.param(COMPUTED, marks=pytest.mark.nightly, id="scored twice"),
    ],
)
async def test_streams_go_on_beside_every_nasty_request(
    pair: Stack, left_out: tuple[str, ...]
) -> None:
    """Each is answered as allowed or refused by 4xx, probes get their 200 meanwhile, streams end as
    they would alone, which is as the reference's, and not one attempt failed."""
    failures = pair.total("router", "tandem:router_attempt_failures_total")
    answered: dict[str, int] = {}
    async with httpx.AsyncClient(base_url=pair.url, timeout=120) as client:
        prompts = [rows()[n].prompt for n in STREAMS]
        beside = [asyncio.create_task(stream(client, each, max_tokens=64)) for each in prompts]
        for name, path, body in [*named(), *of_any_size(7, 12)]:
            if not name.startswith(left_out):
                sent = asyncio.create_task(client.post(path, content=body))
                (await client.get("/health")).raise_for_status()
                answered[name] = (await sent).status_code
        together: list[Answer] = await asyncio.gather(*beside)

    assert {status // 100 for status in answered.values()} <= {2, 4}, json.dumps(answered)
    verdicts = [rows()[n].verdict(each.tokens) for n, each in zip(STREAMS, together, strict=True)]
    assert set(verdicts) <= {"equal", "excused"}, verdicts
    assert pair.total("router", "tandem:router_attempt_failures_total") == failures
