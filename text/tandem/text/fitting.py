"""Estimates of whether a text fits a model's context, before it is tokenized."""

from __future__ import annotations

from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.tokenizer import Tokenizer

BYTES_A_TOKEN = 2
"""Bytes per token below which a text's mean is rare: prose has three to five."""


def refuse_oversized(
    text: str, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams, *, param: str
) -> None:
    """Raise ContextLengthExceeded for a text that no tokenization makes short enough, before it is
    tokenized. If a tokenizer does not represent all bytes, it may drop characters: then nothing is
    checked."""
    if len(text) <= 4 * max_model_len or not tokenizer.spells_bytes:
        return
    fewest = -(-len(text) // tokenizer.longest_token)
    if fewest > max_model_len:
        raise ContextLengthExceeded(
            param,
            num_prompt_tokens=fewest,
            max_tokens=params.max_tokens,
            max_model_len=max_model_len,
            at_least=True,
        )


def seems_to_fit(text: str, params: SamplingParams, max_model_len: int) -> bool:
    """Return whether a text has a token and probably fits next to what ``params`` ask for.
    Remaining cases are decided when it is tokenized."""
    room = max_model_len - max(params.max_tokens or 1, params.min_tokens)
    if room < 1 or not text.strip():
        return False
    try:
        return len(text.encode()) <= BYTES_A_TOKEN * room
    except UnicodeEncodeError:  # no tokenizer takes it
        return False
