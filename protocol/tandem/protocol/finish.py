"""End of a sequence: one rule for the scheduler, a prefill worker's first token and resume.

Stop strings are not handled here: only text/ sees text.
"""

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from tandem.protocol.sampling import SamplingParams


class FinishReason(StrEnum):
    """Reasons for the end of a choice, with OpenAI's names if it has them."""

    STOP = "stop"
    """The end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the longest context that the model can hold."""
    ABORT = "abort"
    """Whoever asked went away, or its deadline passed."""
    ERROR = "error"
    """Nobody could bring the request to its end; an error says why."""


class Finish(NamedTuple):
    """Reason for the end of a choice at its last token."""

    reason: FinishReason
    stop_token: int | None = None
    """Stop id that ended it; None for end-of-sequence and for length."""


def finish_of(
    params: SamplingParams,
    eos_token_ids: Container[int],
    token: int,
    *,
    num_emitted: int,
    num_prompt: int,
    max_model_len: int,
) -> Finish | None:
    """Return how the output ends with ``token``, its ``num_emitted``-th (counted from 1), or None.

    End-of-sequence has precedence over a stop id, and both over length. Neither of them counts
    before ``min_tokens``. The sampler masks them there, but a forced prefix may contain one.
    """
    if num_emitted >= params.min_tokens:
        if not params.ignore_eos and token in eos_token_ids:
            return Finish(FinishReason.STOP)
        if token in params.stop_token_ids:
            return Finish(FinishReason.STOP, token)
    if params.max_tokens is not None and num_emitted >= params.max_tokens:
        return Finish(FinishReason.LENGTH)
    if num_prompt + num_emitted >= max_model_len:
        return Finish(FinishReason.LENGTH)
    return None
