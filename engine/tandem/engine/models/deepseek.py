"""DeepSeek-V2 and V3: multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.attention import Metadata
from tandem.engine.config import ModelFacts
from tandem.engine.config.facts import LatentFacts
from tandem.engine.layers.linear import Linear, RMSNorm
from tandem.engine.layers.rotary import Rotary
from tandem.engine.loader import INPUTS, OUTPUTS, LinearPart, Weights
from tandem.engine.models.base import StepContext
from tandem.engine.models.decoder import Decoder
from tandem.engine.models.moe import MoEBuilder
from tandem.engine.quant import Rows
from tandem.kernels.mla import LatentNorm, latent_kv, rotary_pairs
from tandem.kernels.rotary_kv import Rotation
from tandem.protocol.card import KVKind

_EPS = 1e-6
"""Epsilon of the norms of both latents; config.json states that of the other norms."""


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """Queries as products of a normed latent."""

    norm: RMSNorm
    expand: Linear


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Projection to queries and latents, write of latents, attention. Implements Mixer."""

    index: int
    group: int
    scale: float
    down: Linear
    """Projection to queries, or to their latents, and then to a token's row of the cache."""
    parts: tuple[Linear, Linear] | None
    """``down`` cut into both; None if its form cannot be cut."""
    queries: QueryExpansion | None
    latent_norm: LatentNorm
    kv_b: Tensor
    """[heads, nope + value, rank], of this rank's heads."""
    out: Linear
    head_dim: int
    """Numbers of a head's query."""
    width: int
    """Numbers of a token's row of the cache."""

    @property
    def kind(self) -> KVKind:
        return KVKind.LATENT

    def __call__(self, stream: Tensor, norm: RMSNorm, step: StepContext) -> Tensor:
        """Return the attention of the normed stream [tokens, hidden] before ``out``: [tokens, heads
        * value]."""
        q = self._write(self.down.of_norm(stream, norm, step.rows), step)
        q = self._rotated(q, step.rows, step.rotation(0))
        return self._attend(q, step.metadata(self.group), step)

    def of_rows(self, stream: Tensor, norm: RMSNorm, step: StepContext, rows: Tensor) -> Tensor:
        """Write the latents of all tokens; return the attention of ``rows`` [num_logits] only."""
        meta = step.metadata(self.group).logits_rows
        if meta is None:
            return self(stream, norm, step).index_select(0, rows)
        normed, few = norm(stream), step.rows_at(rows)
        if self.parts is None:
            q = self._write(self.down(normed, step.rows), step).index_select(0, rows)
        else:
            of_q, of_kv = self.parts
            self._write(of_kv(normed, step.rows), step)
            q = of_q(normed.index_select(0, rows), few)
        angles = Rotation(*(each.index_select(0, rows) for each in step.rotation(0)))
        return self._attend(self._rotated(q, few, angles), meta, step)

    def _write(self, projected: Tensor, step: StepContext) -> Tensor:
        """Write the rows at the end of ``projected``; return what precedes them."""
        rows = projected[:, projected.shape[1] - self.width :]
        slots = step.slots(self.group)
        latent_kv(rows, step.kv[self.index], step.rotation(0), slots, self.latent_norm)
        return projected[:, : projected.shape[1] - self.width]

    def _rotated(self, q: Tensor, rows: Rows, angles: Rotation) -> Tensor:
        """Return the queries [tokens, heads, nope + rope]."""
        if self.queries is not None:
            q = self.queries.expand(self.queries.norm(q), rows)
        return rotary_pairs(q.view(len(q), self.kv_b.shape[0], self.head_dim), angles)

    def _attend(self, q: Tensor, meta: Metadata, step: StepContext) -> Tensor:
        kv = step.kv[self.index]
        return step.attention.latent(q, kv, self.kv_b, meta, self.scale).flatten(1)


@dataclass(frozen=True, slots=True)
class DeepseekBuilder(MoEBuilder):
    """Builder of one model."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Return the pattern of the layer after the last, which predicts another token."""
        return (f"{self.prefix}layers.{self.facts.num_layers}.*",)

    @property
    def latent(self) -> LatentFacts:
        assert self.facts.latent is not None, "the family has latents"
        return self.facts.latent

    def rotaries(self) -> tuple[Rotary, ...]:
        """Return the rotary embedding of the rotated part of a head."""
        facts = replace(self.facts, head_dim=self.latent.rope_dim)
        return (Rotary(facts, dtype=self.weights.dtype, device=self.weights.device),)

    def attention(self, index: int, prefix: str) -> LatentAttention:
        """Return the attention. Ranks have parts of the heads, and each the whole latents."""
        facts, latent, ranks = self.facts, self.latent, self.weights.ranks.size
        width = facts.num_heads * facts.head_dim
        down = self.down(prefix, width)
        norm = self.vector(f"{prefix}.kv_a_layernorm.weight", latent.rank)
        return LatentAttention(
            index=index,
            group=self.groups[index],
            scale=self.scores(index).scale,
            down=down,
            parts=down.split(latent.q_rank or width // ranks),
            queries=self.queries(prefix, width),
            latent_norm=LatentNorm(norm, _EPS),
            kv_b=self.expansion(prefix),
            out=self.linear(
                {f"{prefix}.o_proj": facts.hidden_size},
                facts.num_heads * latent.value_dim,
                bias=False,
                dim=INPUTS,
            ),
            head_dim=facts.head_dim,
            width=latent.width,
        )

    def down(self, prefix: str, width: int) -> Linear:
        """Return the projection to queries of ``width``, or to their latents, and to the row of the
        cache. Ranks have parts of the queries only."""
        weights, rank, hidden = self.weights, self.latent.q_rank, self.facts.hidden_size
        first = LinearPart(f"{prefix}.q_proj", (width, hidden), shard=weights.shard(OUTPUTS))
        if rank is not None:
            first = LinearPart(f"{prefix}.q_a_proj", (rank, hidden))
        row = LinearPart(f"{prefix}.kv_a_proj_with_mqa", (self.latent.width, hidden))
        return Linear.load(self.method, weights, [first, row])

    def queries(self, prefix: str, width: int) -> QueryExpansion | None:
        """Return the expansion of the queries' latents; None without these."""
        rank = self.latent.q_rank
        if rank is None:
            return None
        norm = RMSNorm(self.vector(f"{prefix}.q_a_layernorm.weight", rank), _EPS)
        return QueryExpansion(norm, self.linear({f"{prefix}.q_b_proj": width}, rank, bias=False))

    def expansion(self, prefix: str) -> Tensor:
        """Return kv_b_proj, [heads, nope + value, rank], plain in any form of weights: its product
        with every unit vector."""
        latent, weights = self.latent, self.weights
        both = latent.nope_dim + latent.value_dim
        parts = {f"{prefix}.kv_b_proj": self.facts.num_heads * both}
        units = torch.eye(latent.rank, dtype=weights.dtype, device=weights.device)
        found = self.linear(parts, latent.rank, bias=False).in_float32(units)
        return found.T.to(weights.dtype).contiguous().view(-1, both, latent.rank)


def load(facts: ModelFacts, weights: Weights) -> Decoder:
    """Load the model with its weights. Raises a LoadError."""
    return DeepseekBuilder.of(facts, weights).build()
