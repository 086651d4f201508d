"""Times of steps, copies of KV and messages, fitted to two H100s.

A step's time is a sum: what its products take, what attention of prompts' tokens to those before
them takes, and what decodes take by reading their KV. Products read all weights once and multiply
them by every row that the step is padded to, of decodes and of prompts alike, so that they take
little more than the longer of the two: prompt tokens beside decodes cost what they add to reading.
The coefficients follow from the model's shape and two rates of the device, the operations and the
bytes a second that it reaches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.engine.config.facts import ModelFacts
from tandem.engine.step import StepRow
from tandem.engine.timing import Padding

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

    flops: float = 635e12
    """Operations a second of steps of prompts."""
    read: float = 2.77e12
    """Bytes of weights a second."""
    read_kv: float = 3.3e12
    """Bytes of KV a second of decodes."""
    idle: float = 0.9e-3
    """Of any step, beside reading: gaps between kernels, sampling."""
    step: float = 1.5e-3
    """Of any step with prompt tokens, beside its arithmetic: launches, sampling."""
    row: float = 7e-6
    """Of each decode in a step without prompts."""
    cpu_pool: float = 1.3
    """What attention of prompts takes in steps with decodes, whose chunks are small, over alone."""
    launch: float = 30e-3
    """Of the host, which launches a step of prompts and decodes that no graph holds."""
    jitter: float = 0.04
    """Standard deviation of a step's time over its mean."""
    num_blocks: int = 5_400
    """Of 64 tokens, beside 16 GB of weights, with 90 % of 80 GB in use."""


@dataclass(frozen=True, slots=True)
class Way:
    """Between client, router and workers; seconds and bytes."""

    submit: float = 2.4e-3
    """From a client's call to the worker's inbox: HTTP, tokens, hashes, the link."""
    answer: float = 0.9e-3
    """From a step's end to the client."""
    turn: float = 0.2e-3
    """Of a worker's loop between a step's results and the next launch."""
    wake: float = 0.3e-3
    """Of a loop that slept, and of a message between workers."""
    join: float = 3e-3
    """From a hand-off's end to its request standing in the decode worker's line: threads of two
    processes that wake each other."""
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


SHARPNESS = 4.0
"""How near products are to the longer of reading and multiplying: as a norm of this order."""


class StepTimes:
    """Seconds of steps of one model on one device, whose graphs ``padding`` knows."""

    def __init__(self, facts: ModelFacts, device: Device, padding: Padding | None = None) -> None:
        heads = facts.num_heads * facts.head_dim
        kv = facts.num_kv_heads * facts.head_dim
        layer = facts.hidden_size * (2 * heads + 2 * kv + 3 * facts.intermediate_size)
        weights = facts.num_layers * layer
        head = facts.hidden_size * facts.vocab_size
        self.token = 2 * weights / device.flops
        """Of a row that is multiplied."""
        self.seen = 4 * heads * facts.num_layers / device.flops
        """Of a prompt's token, by attention to each token before it."""
        self.floor = BYTES * (weights + head) / device.read + device.idle
        """Of a step, by reading weights."""
        self.context = 2 * BYTES * kv * facts.num_layers / device.read_kv
        """Of a decode, by reading KV of each token before it."""
        self._device, self._padding = device, padding or Padding()

    def of(self, rows: Iterable[StepRow]) -> float:
        """A step of these rows: a row of one token is a decode, and others are of prompts."""
        decodes = context = tokens = seen = chunks = 0
        for row in rows:
            if row.num_scheduled_tokens == 1:
                decodes += 1
                context += row.num_computed
            else:
                count = row.num_scheduled_tokens
                tokens += count
                chunks += 1
                seen += count * (row.num_computed + count // 2)
        return self.seconds(decodes, context, tokens, seen, chunks)

    def seconds(self, decodes: int, context: int, tokens: int, seen: int, chunks: int = 1) -> float:
        """Return the seconds of so many decodes with ``context`` tokens before them in all, and so
        many prompt tokens of ``chunks`` prompts that look at ``seen`` tokens in all."""
        if not tokens:
            return self.floor + decodes * self._device.row + context * self.context
        padded = self._padding.tokens(decodes, tokens, chunks)
        multiplied = self._device.step + (padded or decodes + tokens) * self.token
        both = self.floor**SHARPNESS + multiplied**SHARPNESS
        looked = seen * self.seen * (self._device.cpu_pool if decodes else 1.0)
        took: float = both ** (1 / SHARPNESS) + context * self.context + looked
        if padded is None and decodes and self._padding.has_beside(1):
            return max(took, self._device.launch)
        return took
