"""Rates, durations and costs of ended steps."""

from __future__ import annotations

from typing import NamedTuple, TypedDict

from tandem.engine.config.facts import ModelFacts
from tandem.engine.scheduler.scheduler import Scheduler
from tandem.engine.scheduler.stats import PrefillRate, PromptLoad
from tandem.engine.step import SchedulerOutput
from tandem.engine.timing import cost_behind
from tandem.protocol.card import KVKind, KVLayout
from tandem.protocol.messages import DecodeBatch, StepTimes

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class StepCost(NamedTuple):
    """Cost of one step on one device."""

    flops: float
    read_bytes: float
    write_bytes: float


class StepCosts:
    """Costs of the steps of one engine."""

    def __init__(self, facts: ModelFacts, layout: KVLayout, dtype: str) -> None:
        """``dtype`` is that of plain weights."""
        attention, scored = _attention(facts)
        experts = facts.experts
        sparse = 0 if experts is None else len(experts.layers)
        mlp = 3 * facts.hidden_size * facts.intermediate_size
        dense = facts.num_layers * attention + (facts.num_layers - sparse) * mlp
        expert = 0
        if experts is not None:
            shared = 3 * facts.hidden_size * (experts.shared_width or 0)
            dense += sparse * (facts.hidden_size * experts.num_experts + shared)
            expert = sparse * experts.num_products * facts.hidden_size * experts.width
        self._experts = experts
        self._linear = dense + expert * (0 if experts is None else experts.experts_per_token)
        """Weights that a token is multiplied with."""
        self._head = facts.hidden_size * facts.vocab_size
        size = _BYTES[dtype]
        held = None if facts.quantization is None else facts.quantization.weight_bytes
        self._dense_bytes = dense * (size if held is None else held)
        self._expert_bytes = expert * (size if held is None else held)
        """Bytes of one expert in all layers."""
        self._head_bytes = self._head * size
        kinds = facts.kinds or (KVKind.FULL,) * facts.num_layers  # an encoder keeps no KV
        attended = [each for each in kinds if each is not KVKind.STATE]
        self._attention = 2 * len(attended) * scored
        """Operations for a token and a position that it attends in all layers."""
        self._window = facts.sliding_window if KVKind.WINDOW in attended else None
        self._full = 1 - attended.count(KVKind.WINDOW) / max(1, len(attended))
        """Share of the attending layers without a window."""
        self._kv_bytes = sum(each.token_bytes for each in layout.groups)

    @property
    def steepness(self) -> float:
        """Return the attention's operations per attended position over a token's other operations:
        the growth of a token's time with each token before it. 0 if a window bounds the positions.
        """
        return self._full * self._attention / (2 * self._linear)

    def of(self, plan: SchedulerOutput) -> StepCost:
        if not plan.rows:
            return StepCost(0.0, 0.0, 0.0)
        tokens = draws = pairs = context = 0
        for row in plan.rows:
            count, before = row.num_scheduled_tokens, row.num_computed
            tokens += count
            draws += bool(row.sample_choices)
            pairs += count * before + count * (count + 1) // 2
            context += before
        seen, read = self._full * pairs, self._full * context
        if self._window is not None:
            for row in plan.rows:
                count, before = row.num_scheduled_tokens, row.num_computed
                seen += (1 - self._full) * _pairs(before, count, self._window)
                read += (1 - self._full) * min(before, self._window)
        flops = 2.0 * (tokens * self._linear + draws * self._head) + seen * self._attention
        weights = self._layer_bytes(tokens) + (self._head_bytes if draws else 0)
        return StepCost(flops, weights + read * self._kv_bytes, tokens * self._kv_bytes)

    def _layer_bytes(self, tokens: int) -> float:
        """Return the bytes that a step of ``tokens`` reads: of the experts, those that uniform
        routes choose."""
        if self._experts is None:
            return self._dense_bytes
        count, chosen = self._experts.num_experts, self._experts.experts_per_token
        return self._dense_bytes + self._expert_bytes * count * (1 - (1 - chosen / count) ** tokens)


def _attention(facts: ModelFacts) -> tuple[int, int]:
    """Return the weights of a layer's attention, and its multiplications for a token and a position
    that it attends; those of a latent's expanded key and value."""
    width, latent = facts.num_heads * facts.head_dim, facts.latent
    if latent is None:
        kv_width = facts.num_kv_heads * facts.head_dim
        return 2 * facts.hidden_size * (width + kv_width), 2 * width
    values = facts.num_heads * latent.value_dim
    queries = facts.hidden_size * width
    if latent.q_rank is not None:
        queries = latent.q_rank * (facts.hidden_size + width)
    expansion = latent.rank * (facts.num_heads * latent.nope_dim + values)
    kept = facts.hidden_size * (latent.width + values)
    return queries + expansion + kept, width + values


def _pairs(before: int, count: int, window: int) -> int:
    whole = max(0, min(count, window - before))
    """Tokens whose window still begins at the sequence's start."""
    return whole * before + whole * (whole + 1) // 2 + (count - whole) * window


class Learned(TypedDict):
    """Measured fields of ``LoadReport``."""

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
        """Record that the step of ``plan`` took ``seconds``, and ended at ``now``."""
        self._request_table.stats.add_cost(*self._costs.of(plan))
        if plan.drafts:
            return  # several tokens of a row may be drafts
        chunked = chunks = ended = decodes = context = 0
        seen = 0.0
        for row in plan.rows:
            count = row.num_scheduled_tokens
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
        if chunked and seconds > 0 and 2 * chunked > plan.total_num_scheduled_tokens:
            self._prefill_rate.note(chunked, seconds)

    def report(self, now: float) -> Learned:
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
