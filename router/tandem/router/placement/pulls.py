"""Predicted gain of pulling a prompt's cached start from a peer. Pure.

Computing the tokens takes as long as the worker's own steps. Pulling them takes as long as their
bytes over the link at its measured rate, after those that wait there, and after the step that the
holder is in. Placement forecasts both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem.protocol.ids import Incarnation
from tandem.router.placement.rates import Rates, chunk_of
from tandem.router.placement.snapshot import (
    UNUSED,
    FleetSnapshot,
    LinkThroughput,
    PromptFacts,
    WorkerView,
    uncached,
)

ROUND_SECONDS = 0.003
"""Seconds of request and reply, and until the puller has reserved and used blocks."""
BUDGET_SECONDS = (0.05, 10.0)
"""Least and most seconds of a pull before its tokens are computed instead."""


@dataclass(frozen=True, slots=True)
class PullPlan:
    """One pull and its predicted times."""

    holder: Incarnation
    num_tokens: int
    """Tokens of the prompt's start that the worker has after it."""
    tokens: int
    """Tokens that are sent over the link."""
    seconds: float
    """Seconds until they are received."""
    compute_s: float
    """Seconds of computing them instead."""

    @property
    def budget_s(self) -> float:
        """Seconds after which the tokens are computed instead."""
        least, most = BUDGET_SECONDS
        return min(max(self.compute_s, least), most)

    def __str__(self) -> str:
        return (
            f"pulls {self.tokens} tokens from {self.holder.hex()[:8]} in "
            f"{self.seconds * 1e3:.0f} ms, computing them {self.compute_s * 1e3:.0f} ms"
        )


def with_pull(prompt: PromptFacts, worker: WorkerView, plan: PullPlan | None) -> PromptFacts:
    """Return the prompt with the worker's cached tokens after the pull."""
    if plan is None:
        return prompt
    return replace(prompt, hits={**prompt.hits, worker.incarnation: plan.num_tokens})


def best_pulls(
    prompt: PromptFacts, fleet: FleetSnapshot, rates: Mapping[Incarnation, Rates]
) -> dict[Incarnation, PullPlan]:
    """Return the pull that saves each worker the most time, for workers that any pull saves
    some."""
    if not (prompt.hits and fleet.pull_links) or prompt.whole:
        return {}
    views = {each.incarnation: each for each in fleet.workers}
    found: dict[Incarnation, PullPlan] = {}
    for pair in fleet.pull_links:
        holder, puller = (views.get(each) for each in pair)
        if holder is None or puller is None or puller.incarnation not in rates or holder.draining:
            continue
        throughput = fleet.paces.get(pair, UNUSED)
        plan = _plan(prompt, puller, holder, rates, throughput)
        if plan is None or plan.seconds >= plan.compute_s:
            continue
        best = found.get(puller.incarnation)
        if best is None or _gain(plan) > _gain(best):
            found[puller.incarnation] = plan
    return found


def _gain(plan: PullPlan) -> tuple[float, Incarnation]:
    return plan.compute_s - plan.seconds, plan.holder


def _plan(
    prompt: PromptFacts,
    puller: WorkerView,
    holder: WorkerView,
    rates: Mapping[Incarnation, Rates],
    throughput: LinkThroughput,
) -> PullPlan | None:
    own, size = rates[puller.incarnation], puller.block_size
    have = prompt.hits.get(puller.incarnation, 0)
    upto = min(prompt.hits.get(holder.incarnation, 0), (prompt.num_tokens - 1) // size * size)
    tokens, rate = upto - have, throughput.bytes_per_s or throughput.probed_bytes_per_s
    if tokens <= 0 or not rate or puller.fingerprint != holder.fingerprint:
        return None
    chunk, decode_batch = chunk_of(puller), puller.decode_batch
    alone = own.compute(uncached(prompt, puller), chunk, decode_batch, have)
    rest = own.compute(prompt.num_tokens - upto, chunk, decode_batch, upto)
    step = _current_step(holder, rates.get(holder.incarnation))
    seconds = ROUND_SECONDS + step + throughput.wait + tokens * puller.token_bytes / rate
    return PullPlan(holder.incarnation, upto, tokens, seconds, max(0.0, alone - rest))


def _current_step(holder: WorkerView, rates: Rates | None) -> float:
    """Return the seconds of the step that the holder is in."""
    prompts = min(holder.compute_tokens, chunk_of(holder))
    if rates is None or not (prompts or holder.decode_batch.streams):
        return 0.0
    return rates.step(holder.decode_batch, prompts)
