"""When a sequence of tokens is done: the one rule that scheduler, P's first token and resume use.

Stop strings are not here: only text/ sees text.
"""

from collections.abc import Container
from enum import StrEnum
from typing import NamedTuple

from tandem.protocol.sampling import SamplingParams


class FinishReason(StrEnum):
    """OpenAI's words where they exist."""

    STOP = "stop"
    """The end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens, or the longest context that the model can hold."""
    ABORT = "abort"
    """Whoever asked went away, or its deadline passed."""
    ERROR = "error"
    """Nobody could bring the request to its end; an error says why."""


class Finish(NamedTuple):
    """The verdict on the last token."""

    reason: FinishReason
    stop_token: int | None = None
    """The stop id that ended it; None for end-of-sequence and for length."""


def finish_of(
    params: SamplingParams,
    eos_token_ids: Container[int],
    token: int,
    *,
    num_emitted: int,
    num_prompt: int,
    max_model_len: int,
) -> Finish | None:
    """Whether the output ends with ``token``, its ``num_emitted``-th (counted from 1).

    End-of-sequence wins over a stop id, both win over length; neither counts before
    ``min_tokens`` (the sampler masks them there, a forced prefix may still hold one).
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
