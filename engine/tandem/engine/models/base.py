"""Interfaces of a model to the runner, and of a step to a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tandem.engine.attention import AttentionBackend, Metadata, StepSequences, WholePrompts
from tandem.engine.layers.rotary import Rotary
from tandem.kernels.gated_delta import Spans
from tandem.kernels.rotary_kv import Rotation, SlotMapping

Input = TypeVar("Input")


@dataclass(frozen=True, slots=True)
class TokenTypes:
    """Types of a step's tokens, of which some are not 0."""

    types: Tensor
    """int64 [tokens]."""


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Prompt tokens of a step that requests gave as vectors (``prompt_embeds``)."""

    index: Tensor
    """int64 [embedded]: their indices among the step's tokens."""
    vectors: Sequence[Tensor]
    """[.., hidden] each, of any float dtype; concatenated, parallel to ``index``."""

    def put(self, stream: Tensor) -> None:
        """Write the vectors into the stream [tokens, hidden] in place, in its dtype."""
        rows = torch.cat([each.to(stream.dtype) for each in self.vectors])
        stream.index_copy_(0, self.index, rows)

    def padded(self, num_decodes: int, padding: int) -> EmbeddedTokens:
        """Return the same tokens of a step that is padded by ``padding`` decodes."""
        if not padding:
            return self
        return EmbeddedTokens(self.index + padding * (self.index >= num_decodes), self.vectors)


@dataclass(frozen=True, slots=True)
class StagedVectors:
    """Vectors at the addresses that a CUDA graph reads, for any tokens of its class."""

    present: Tensor
    """bool [tokens, 1]."""
    vectors: Tensor
    """float32 [tokens, hidden]."""

    def put(self, stream: Tensor) -> None:
        """See ``EmbeddedTokens.put``."""
        torch.where(self.present, self.vectors.to(stream.dtype), stream, out=stream)


class LastLayersQueued(NamedTuple):
    """Callback for when all but the last layers of a step are queued."""

    layers_left: int
    """One or more."""
    note: Callable[[], None]


@dataclass(frozen=True)
class StepContext:
    """State that the layers of one step share. Angles and metadata are made when first requested:
    the device is busy by then."""

    rotaries: Sequence[Rotary]
    """Rotary embeddings of the layers; empty if positions have a table."""
    positions: Tensor
    """int64 [tokens]."""
    slot_mapping: SlotMapping
    """Its blocks are [groups, tokens]."""
    attention: AttentionBackend
    sequences: StepSequences
    kv: Sequence[Tensor]
    """Per layer, its view of the KV cache: [num_blocks, 2, kv_heads, block_size, head_dim]; of
    latents [num_blocks, block_size, numbers]; of states float32 [num_blocks, heads, numbers]."""
    kv_scales: Mapping[int, Tensor] = field(default_factory=dict)
    """Per layer whose pages hold codes, their factors: float32 [2, kv_heads]."""
    inputs: Sequence[object] = ()
    """Inputs in addition to tokens, such as ``EmbeddedTokens``; see ``given``."""
    on_last_layers: LastLayersQueued | None = None
    """Callback of decoders."""
    _rotations: dict[int, Rotation] = field(default_factory=dict)
    _metadata: dict[int, Metadata] = field(default_factory=dict)

    @cached_property
    def rows(self) -> TokenRows:
        return TokenRows(self.positions, self.sequences, self.inputs, None)

    def rows_at(self, index: Tensor) -> TokenRows:
        return TokenRows(self.positions, self.sequences, self.inputs, index)

    def given(self, kind: type[Input]) -> Iterator[Input]:
        """Yield the step's inputs of one kind."""
        return (each for each in self.inputs if isinstance(each, kind))

    def rotation(self, number: int) -> Rotation:
        """Return the angles of the step's tokens by one of the ``rotaries``."""
        found = self._rotations.get(number)
        if found is None:
            found = self._rotations[number] = self.rotaries[number](self.positions)
        return found

    def metadata(self, group: int) -> Metadata:
        """Return the attention's metadata for the layers of a group."""
        found = self._metadata.get(group)
        if found is None:
            found = self._metadata[group] = self.attention.plan(self.sequences, group)
        return found

    def slots(self, group: int) -> SlotMapping:
        """Return the slots of the step's tokens in the blocks of a group."""
        return SlotMapping(self.slot_mapping.blocks[group], self.slot_mapping.offsets)

    @cached_property
    def spans(self) -> Spans:
        """Return the tokens of each row, for layers with states."""
        step = self.sequences
        return Spans.of(
            step.num_decodes, step.chunk_cu_seqlens_q, step.seq_lens, step.max_query_len
        )

    @cached_property
    def prompts(self) -> WholePrompts:
        """Return the step's sequences, which must be whole prompts."""
        step = self.sequences
        heads = step.cu_seqlens_q[: step.num_decodes]
        starts = torch.cat((heads, step.chunk_cu_seqlens_q + step.num_decodes))
        return WholePrompts(starts, max(step.max_query_len, min(step.num_decodes, 1)))


@dataclass(frozen=True)
class TokenRows:
    """Sequences of a product's rows, made when they are read. Implements quant's Rows.

    Holds no StepContext: a cycle would delay the release of the step's tensors.
    """

    all_positions: Tensor
    """int64 [tokens], the step's."""
    step: StepSequences
    inputs: Sequence[object]
    index: Tensor | None
    """int64 places among the step's tokens; None is all."""

    @cached_property
    def positions(self) -> Tensor:
        return self._picked(self.all_positions)

    @cached_property
    def sequences(self) -> Tensor:
        """Return each row's sequence. Tokens of padding belong to some sequence of the step."""
        step, at = self.step, self.all_positions
        tokens = torch.arange(len(at), device=at.device)
        ends = torch.cat((step.cu_seqlens_q[1 : step.num_decodes + 1], self._chunk_ends(step)))
        found = torch.searchsorted(ends, tokens.to(ends.dtype), right=True)
        return self._picked(found.clamp_(max=len(ends) - 1))

    def given(self, kind: type[Input]) -> Iterator[Input]:
        return (each for each in self.inputs if isinstance(each, kind))

    @staticmethod
    def _chunk_ends(step: StepSequences) -> Tensor:
        return step.chunk_cu_seqlens_q[1:] + step.num_decodes

    def _picked(self, of_all: Tensor) -> Tensor:
        return of_all if self.index is None else of_all.index_select(0, self.index)


class CausalModel(Protocol):
    """A model of one rank: a decoder, or an encoder, which has no logits."""

    @property
    def rotaries(self) -> Sequence[Rotary]:
        """Return the rotary embeddings of queries and keys; none if positions have a table."""
        ...

    def forward(self, token_ids: Tensor, step: StepContext, rows: Tensor | None) -> Tensor:
        """Write the step's KV, if any is kept; return hidden states [rows, hidden] after the last
        norm.

        ``token_ids`` is int64 [tokens]. ``rows`` is int64, the returned tokens; None is all, in
        order.
        """
        ...

    def shortened(self, layers: int) -> CausalModel:
        """Return this model with its last ``layers`` only; three launch every kernel of the whole
        model."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, vocabulary] of hidden states [rows, hidden]."""
        ...

    def token_vectors(self, hidden: Tensor) -> Tensor:
        """Return the tokens' vectors, float32 [rows, values], of states float32 [rows, hidden]."""
        ...

    def classify(self, hidden: Tensor) -> Tensor:
        """Return float32 [rows, labels] of states float32 [rows, hidden], if it has labels."""
        ...

    def probabilities(self, scores: Tensor) -> Tensor:
        """Return the probabilities of float32 [rows, labels] that ``classify`` returned."""
        ...
