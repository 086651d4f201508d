"""Outputs for callers, in vLLM's names."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

from tandem.protocol.pooling import PoolingTask
from tandem.text.input_processor import ProcessedInput
from tandem.text.output_processor import CompletionOutput, Logprob, PositionLogprobs, RequestState

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PooledRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "PositionLogprobs",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
    "data_of",
    "floats_of",
    "rendered",
]


class PooledRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a pooled prompt, as bytes."""

    prompt_token_ids: Sequence[int]
    values: bytes
    """float32, little-endian."""
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""

    @property
    def floats(self) -> array[float]:
        return floats_of(self.values)


def floats_of(values: bytes) -> array[float]:
    """Return the float32 numbers of little-endian bytes."""
    found = array("f", values)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def data_of(output: PooledRequestOutput, task: PoolingTask) -> list[float] | list[list[float]]:
    """Return the values in the shape of the task."""
    if task != PoolingTask.TOKEN_EMBED:
        return output.floats.tolist()
    values = output.floats
    size = len(values) // len(output.prompt_token_ids)
    return [values[at : at + size].tolist() for at in range(0, len(values), size)]


class PoolingOutput(msgspec.Struct, frozen=True):
    """Output of a pooled prompt, for any task."""

    data: list[float] | list[list[float]]
    """A vector, a number for each label, or a vector for each token of the prompt."""


class PoolingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a prompt that was pooled."""

    prompt_token_ids: Sequence[int]
    outputs: PoolingOutput
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""


class ClassificationOutput(msgspec.Struct, frozen=True):
    """Numbers for the labels of the model."""

    probs: list[float]


class ClassificationRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a prompt that was classified."""

    prompt_token_ids: Sequence[int]
    outputs: ClassificationOutput
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""


class ScoringOutput(msgspec.Struct, frozen=True):
    """Score of two texts."""

    score: float


class ScoringRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a pair of texts."""

    prompt_token_ids: Sequence[int]
    """Token ids of both texts, concatenated."""
    outputs: ScoringOutput
    num_cached_tokens: int
    """Prompt tokens that were not computed for this pair."""


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """One vector."""

    embedding: list[float]
    """float32 values, as many as the model's hidden states have."""


class EmbeddingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a prompt that was pooled."""

    prompt_token_ids: Sequence[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """State of one request. ``SamplingParams.output_kind`` decides the content of ``outputs``:

    DELTA: the one choice with new tokens, and only those. CUMULATIVE: the one choice with new
    tokens, with all of it so far. FINAL_ONLY: every choice, once, at the end.
    """

    request_id: str
    """The caller's id."""
    prompt: str | None
    """Text of the prompt, chat template applied; None if only ids were given."""
    prompt_token_ids: Sequence[int]
    """Token ids of the prompt. A prompt of embeddings has a zero for each, as in vLLM."""
    prompt_logprobs: Sequence[PositionLogprobs | None] | None
    """One per prompt token, None for the first; None unless requested."""
    outputs: Sequence[CompletionOutput]
    finished: bool
    """True if every choice has ended. No output follows."""
    num_cached_tokens: int | None
    """Prompt tokens that were not computed for this request."""
    num_generated_tokens: int
    """Generated tokens of all choices so far: ``completion_tokens`` of the usage."""
    is_embeds: bool = False
    """True if the prompt was given as embeddings."""


def rendered(
    request_id: str,
    processed: ProcessedInput,
    state: RequestState,
    shown: Sequence[CompletionOutput],
) -> RequestOutput:
    """Return the output of a request in its current state, with the choices ``shown``."""
    request = processed.request
    return RequestOutput(
        request_id=request_id,
        prompt=processed.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=state.prompt_logprobs,
        outputs=shown,
        finished=state.finished,
        num_cached_tokens=state.num_cached_tokens,
        num_generated_tokens=state.num_generated_tokens,
        is_embeds=request.prompt_embeds is not None,
    )
