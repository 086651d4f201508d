"""Cost of a step on its device: operations, and bytes read and written, by the model's shape.

The cost is an estimate of what the arithmetic needs, not a measurement. Products count twice their
weights for a token, attention its keys and values. Weights are read once a step, KV once a row.
Extra work of kernels (padding, activations) is not counted, so it lowers the shares of the peak
(MFU, MBU).
"""

from __future__ import annotations

from typing import NamedTuple

from tandem.engine.config.facts import ModelFacts
from tandem.engine.step import SchedulerOutput
from tandem.protocol.layout import KVLayout

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FP8_BYTES = 1.0 + 4.0 / (128 * 128)
"""A weight and its share of a block's scale."""


class StepCost(NamedTuple):
    """Cost of one step on one device."""

    flops: float
    read_bytes: float
    write_bytes: float


class StepCosts:
    """Costs of the steps of one engine."""

    def __init__(self, facts: ModelFacts, layout: KVLayout, dtype: str) -> None:
        """``dtype`` is that of plain weights."""
        heads = facts.num_heads * facts.head_dim
        kv_heads = facts.num_kv_heads * facts.head_dim
        attention = facts.hidden_size * (2 * heads + 2 * kv_heads)
        layer = attention + 3 * facts.hidden_size * facts.intermediate_size
        self._linear = facts.num_layers * layer
        self._head = facts.hidden_size * facts.vocab_size
        self._attention = 4 * facts.num_layers * heads
        """Operations for a token and a position that it sees."""
        size = _BYTES[dtype]
        each = size if facts.quantization is None else _FP8_BYTES
        self._layer_bytes = self._linear * each
        self._head_bytes = self._head * size
        self._window = facts.sliding_window
        self._kv_bytes = layout.block_bytes / layout.block_size

    @property
    def steepness(self) -> float:
        """Return the operations of a token for each attended position, over those of its products.
        A prompt's token takes longer by this share for each token before it. 0 if a window bounds
        the positions."""
        return 0.0 if self._window is not None else self._attention / (2 * self._linear)

    def of(self, plan: SchedulerOutput) -> StepCost:
        """Return the cost of one plan; zeros for one that computes nothing."""
        if not plan.rows:
            return StepCost(0.0, 0.0, 0.0)
        tokens = draws = seen = read = 0
        for row in plan.rows:
            count, before = row.num_tokens, row.num_computed
            tokens += count
            draws += bool(row.sample_choices)
            seen += self._pairs(before, count)
            read += before if self._window is None else min(before, self._window)
        flops = 2.0 * (tokens * self._linear + draws * self._head) + seen * self._attention
        weights = self._layer_bytes + (self._head_bytes if draws else 0)
        return StepCost(flops, weights + read * self._kv_bytes, tokens * self._kv_bytes)

    def _pairs(self, before: int, count: int) -> int:
        """Return the number of (token, attended position) pairs of ``count`` tokens after
        ``before``; tokens attend to themselves too."""
        last = before + count
        if self._window is None or last <= self._window:
            return count * before + count * (count + 1) // 2
        whole = max(0, min(count, self._window - before))
        """Tokens whose window still begins at the sequence's start."""
        return whole * before + whole * (whole + 1) // 2 + (count - whole) * self._window
