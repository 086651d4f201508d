"""A cached prefix is pulled by a pod from another one, past the policies, from node to node."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import httpx
import pytest
from client import Answer, body_of, events, stream
from reference import rows
from tests.e2e_cluster import pods
from tests.e2e_cluster.kube import wait_for
from tests.e2e_cluster.service import NAME, Service

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PROMPT = 41
"""Of the reference, with 482 tokens: a second or so to compute, milliseconds to pull."""
WARMING = 3, 6
"""Short ones, with whole answers."""
BLOCK = 16
"""Tokens."""
SECONDS = 60.0
LINK_SECONDS = 100.0
"""Until links were probed again that were probed first while all pods of the service started."""
LEAST = 30e6
"""Bytes a second by which the prompt's 22 MB come sooner than a busy core computes them."""
BEATS_SECONDS = 1.0
"""Two beats of a worker."""


@pytest.mark.nightly
def test_a_decode_pod_pulls_what_another_one_has_cached(short_lived: list[Service]) -> None:
    """The pod that computed a prompt answers still, in its only seat: the next of that prompt goes
    to the other one, which pulls the prompt. Every answer is the reference's."""
    served = short_lived[0]
    served.wait_ready()
    workers = served.pods("decode")
    assert len({pods.node_of(each) for each in workers}) == 2
    assert served.kube.find("networkpolicy", f"{NAME}-decode"), "nothing fences the pods"
    url = served.url()
    wait_for("links that are worth a pull", lambda: _are_linked(url), seconds=LINK_SECONDS)

    computed, pulled, cached_tokens = asyncio.run(_ask(url))

    samples = {pods.name_of(each): pods.metrics(served.kube, each) for each in workers}
    seen = f"{computed}\n{pulled}\n{samples}"
    assert pulled["worker"] != computed["worker"], seen
    assert pulled["pull"] is not None, seen
    assert pulled["pull"]["holder"] == computed["worker"], seen
    assert cached_tokens >= 480, seen
    names = {each["incarnation"]: each["pod"] for each in _fleet(url)["workers"]}
    puller, holder = (samples[names[each["worker"]]] for each in (pulled, computed))
    assert pods.total(puller, "tandem:kv_prefix_pulls_total") == 1, seen
    assert pods.total(puller, "tandem:kv_prefix_pull_fallbacks_total") == 0, seen
    assert pods.total(holder, "tandem:kv_prefix_lent_tokens_total") >= 480, seen


async def _ask(url: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The prompt twice: computed, with an answer that keeps its seat, and meanwhile once more. How
    both were placed, and how many tokens the second had cached."""
    prompt = rows()[PROMPT].prompt
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        # From then on routers know how long a seat is kept, which is longer than a pull takes.
        await asyncio.gather(*(stream(client, rows()[each].prompt, model=NAME) for each in WARMING))
        # Until a beat says otherwise, routers take a seat for taken; a late one says so again.
        since = time.monotonic() + BEATS_SECONDS
        idle = partial(_is_idle, url, since)
        await asyncio.to_thread(wait_for, "free seats", idle, seconds=SECONDS)
        least = _fleet(url)["indexed_blocks"] + len(prompt) // BLOCK
        kept = Answer()
        seated = events(client, prompt, kept, model=NAME, max_tokens=900)
        await anext(seated)
        cached = partial(_has_indexed, url, least)
        await asyncio.to_thread(wait_for, "cached blocks", cached, seconds=SECONDS)
        computed = await _latest(client)
        response = await client.post("/v1/completions", json=body_of(prompt, model=NAME))
        pulled = await _latest(client)
        async for _ in seated:
            if len(kept.tokens) >= 64:
                break
        await seated.aclose()
    assert response.status_code == 200, response.text
    content = response.json()
    kept.tokens = kept.tokens[:64]
    _hold(kept)
    _hold(Answer(200, content["choices"][0]["token_ids"]))
    return computed, pulled, content["usage"]["prompt_tokens_details"]["cached_tokens"]


def _hold(answer: Answer) -> None:
    assert answer.error is None, answer.error
    assert rows()[PROMPT].verdict(answer.tokens) in ("equal", "excused")


def _are_linked(url: str) -> bool:
    """Whether each pod can pull from the other one, and soon."""
    links = _fleet(url)["pull_links"]
    return len(links) == 2 and min(each["bytes_per_s"] for each in links) >= LEAST


def _is_idle(url: str, since: float) -> bool:
    """Whether the router has heard, since then, that nobody has anything to do."""
    workers, now = _fleet(url)["workers"], time.monotonic()
    heard = [now - each["heard_ms_ago"] / 1000 for each in workers]
    busy = [each for each in workers if each["running"] or each["waiting"] or each["legs"]]
    return min(heard) > since and not busy


def _has_indexed(url: str, least: int) -> bool:
    return bool(_fleet(url)["indexed_blocks"] >= least)


def _fleet(url: str) -> dict[str, Any]:
    fleet: dict[str, Any] = httpx.get(f"{url}/debug/fleet", timeout=5).json()
    return fleet


async def _latest(client: httpx.AsyncClient) -> dict[str, Any]:
    """The way that the latest prompt of this length went."""
    placements = (await client.get("/debug/placements")).json()["placements"]
    length = len(rows()[PROMPT].prompt)
    latest = next(each for each in placements if each["prompt_tokens"] == length)
    (way,) = [each for each in latest["ways"] if each["chosen"]]
    found: dict[str, Any] = way
    return found
