"""Whether a text fits a model's context, as far as that is known before its tokens are."""

from __future__ import annotations

from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.tokenizer import Tokenizer

TOKENS_AROUND = 16
"""Special tokens that a tokenizer puts around a text, at most."""


def refuse_oversized(
    text: str, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams, *, param: str
) -> None:
    """Raise ContextLengthExceeded for a text that fits under no tokenization: it need not be
    tokenized. A tokenizer that does not spell out all bytes may drop characters: nothing follows
    from their number."""
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


def fits_anyhow(text: str, room: int) -> bool:
    """Whether a text has some token and at most ``room``, whatever they are: a token stands for a
    byte or more. (A normalizer may spell out what its reader wrote shorter; that is seen when the
    text is tokenized.)"""
    if not text.strip():
        return False
    try:
        return len(text.encode()) + TOKENS_AROUND <= room
    except UnicodeEncodeError:  # no tokenizer takes it
        return False
