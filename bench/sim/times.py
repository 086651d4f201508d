"""What things take: steps, copies of KV, messages. Fitted to two H100s, see calibrate.py.

A step's time is a sum: what reading weights takes, what each token of a prompt takes by products
and by attention to what lies before it, and what each decode takes by its row and by reading its
KV. The coefficients follow from the model's shape and two rates of the device, the operations and
the bytes a second that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.engine.config.facts import ModelFacts
from tandem.engine.step import StepRow

QWEN3_8B = ModelFacts(
    architecture="Qwen3ForCausalLM",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_position_embeddings=40960,
    qk_norm=True,
    dtype="bfloat16",
)
BYTES = 2
"""Of a weight, or a value of KV."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU as the engine finds it, and the way from worker to worker; seconds and bytes."""

    flops: float = 640e12
    """Operations a second of steps of prompts."""
    read: float = 2.77e12
    """Bytes a second of steps of decodes."""
    step: float = 1.5e-3
    """Of any step with prompt tokens, beside its arithmetic: launches, sampling."""
    row: float = 9e-6
    """Of each decode in a step."""
    jitter: float = 0.03
    """Standard deviation of a step's time over its mean."""
    num_blocks: int = 5_400
    """Of 64 tokens, beside 16 GB of weights, with 90 % of 80 GB in use."""


@dataclass(frozen=True, slots=True)
class Way:
    """Between client, router and workers; seconds and bytes."""

    submit: float = 1.6e-3
    """From a client's call to the worker's inbox: HTTP, tokens, hashes, the link."""
    answer: float = 0.9e-3
    """From a step's end to the client."""
    turn: float = 0.2e-3
    """Of a worker's loop between a step's results and the next launch."""
    wake: float = 0.3e-3
    """Of a loop that slept, and of a message between workers."""
    copy: float = 380e9
    """Bytes a second of KV that is copied from GPU to GPU."""
    block: float = 1e-5
    """Of each block copied, beside its bytes."""
    copies: float = 0.3e-3
    """Of each chunk that is copied, beside its blocks."""
    beat: float = 1.0
    """Between two load reports that a router gets."""
    report: float = 0.2
    """Between two load reports that a worker makes."""


class StepTimes:
    """Seconds of steps of one model on one device."""

    def __init__(self, facts: ModelFacts, device: Device) -> None:
        heads = facts.num_heads * facts.head_dim
        kv = facts.num_kv_heads * facts.head_dim
        layer = facts.hidden_size * (2 * heads + 2 * kv + 3 * facts.intermediate_size)
        weights = facts.num_layers * layer
        head = facts.hidden_size * facts.vocab_size
        self.token = 2 * weights / device.flops
        """Of a prompt's token, by products."""
        self.seen = 4 * heads * facts.num_layers / device.flops
        """Of a prompt's token, by attention to each token before it."""
        self.floor = BYTES * (weights + head) / device.read
        """Of a step, by reading weights."""
        self.context = 2 * BYTES * kv * facts.num_layers / device.read
        """Of a decode, by reading KV of each token before it."""
        self._device = device

    def of(self, rows: Iterable[StepRow]) -> float:
        """A step of these rows: a row of one token is a decode, and others are of prompts."""
        decodes = context = tokens = seen = 0
        for row in rows:
            if row.num_tokens == 1:
                decodes += 1
                context += row.num_computed
            else:
                tokens += row.num_tokens
                seen += row.num_tokens * (row.num_computed + row.num_tokens // 2)
        return self.seconds(decodes, context, tokens, seen)

    def seconds(self, decodes: int, context: int, tokens: int, seen: int) -> float:
        """Of so many decodes with ``context`` tokens before them in all, and so many prompt
        tokens that look at ``seen`` tokens in all."""
        prompt = tokens * self.token + seen * self.seen + (self._device.step if tokens else 0.0)
        if not decodes:
            return max(prompt, self.floor)
        return self.floor + decodes * self._device.row + context * self.context + prompt
