"""What a caller gets back, in vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.text.logprobs import Logprob, PositionLogprobs
from tandem.text.output_processor import CompletionOutput

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "PositionLogprobs",
    "RequestOutput",
]


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """One vector."""

    embedding: list[float]
    """float32 values, as many as the model's hidden states have."""


class EmbeddingRequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a prompt that was pooled."""

    prompt_token_ids: Sequence[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int
    """Prompt tokens that were not computed for this request."""


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one request. What ``outputs`` holds depends on ``SamplingParams.output_kind``:

    DELTA: the one choice that has something new, and only that. CUMULATIVE: the one choice that
    has something new, with all of it so far. FINAL_ONLY: every choice, once, at the end.
    """

    request_id: str
    """The caller's id."""
    prompt: str | None
    """Text of the prompt, chat template applied; None where only ids were given."""
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[PositionLogprobs | None] | None
    """One per prompt token, None for the first; None unless asked for."""
    outputs: Sequence[CompletionOutput]
    finished: bool
    """Whether every choice has ended; nothing follows."""
    num_cached_tokens: int | None
    """Prompt tokens that were not computed for this request."""
    num_generated_tokens: int
    """Of all choices so far: ``completion_tokens`` of the usage."""
