"""Measurements of an engine's ended steps: rates, times of steps, costs."""

from __future__ import annotations

from typing import TypedDict

from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.scheduler.stats import PrefillRate, PromptLoad
from tandem.engine.step import SchedulerOutput
from tandem.engine.timing.step_costs import StepCosts
from tandem.engine.timing.step_times import cost_behind
from tandem.protocol.steps import DecodeBatch, StepTimes


class Learned(TypedDict):
    """Fields of ``LoadReport``, which describes each."""

    prefill_tokens_per_s: float
    decode_steps: StepTimes
    context_s: float
    prompt_steps: StepTimes
    mixed_steps: StepTimes
    steepness: float
    residence_s: float
    prompt_share: float
    prompts_per_s: float


class StepNotes:
    """Measurements of one scheduler's steps."""

    def __init__(self, scheduler: Scheduler, costs: StepCosts) -> None:
        self._request_table = scheduler.request_table
        self._measured = scheduler.measured
        self._measured.steepness = costs.steepness
        self._costs = costs
        self._padding = scheduler.padding
        self._prefill_rate = PrefillRate()
        self._prompt_load = PromptLoad()

    def note(self, plan: SchedulerOutput, seconds: float, now: float) -> None:
        """Note that the step of ``plan`` took ``seconds``, and ended at ``now``.

        Kept are prompt tokens a second (over steps that are mostly prompt), the times of steps by
        their content, and their cost on the device.
        """
        self._request_table.stats.add_cost(*self._costs.of(plan))
        if plan.drafts:
            return  # several tokens of a row need not be a prompt's
        chunked = chunks = ended = decodes = context = 0
        seen = 0.0
        for row in plan.rows:
            count = row.num_tokens
            if count > 1:
                chunked += count
                chunks += 1
                seen += cost_behind(row.num_computed, count, self._measured.steepness) - count
                ended += bool(row.sample_choices)
            else:
                decodes += 1
                context += row.num_computed
        decode_batch = DecodeBatch(decodes, context)
        if plan.rows:
            weight = self._padding.weight(decodes, chunked, chunks) if chunks else 0
            self._measured.note(decode_batch, weight + round(seen), seconds)
        if chunked:
            self._prompt_load.note(
                seconds - self._measured.decode_seconds(decode_batch), ended, now
            )
        if chunked and seconds > 0 and 2 * chunked > plan.num_tokens:
            self._prefill_rate.note(chunked, seconds)

    def report(self, now: float) -> Learned:
        """Return the measurements from which placement forecasts."""
        share, prompts_per_s = self._prompt_load.report(now)
        return Learned(
            prefill_tokens_per_s=self._prefill_rate.tokens_per_s,
            decode_steps=self._measured.decode_steps,
            context_s=self._measured.context_s,
            prompt_steps=self._measured.prompt_steps,
            mixed_steps=self._measured.mixed_steps,
            steepness=self._measured.steepness,
            residence_s=self._measured.residence_s,
            prompt_share=share,
            prompts_per_s=prompts_per_s,
        )
