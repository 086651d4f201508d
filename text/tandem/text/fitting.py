"""Whether a text fits a model's context, as far as that is known before its tokens are."""

from __future__ import annotations

from tandem.protocol.sampling import SamplingParams
from tandem.text.errors import ContextLengthExceeded
from tandem.text.tokenizer import Tokenizer

BYTES_A_TOKEN = 2
"""Texts of fewer in the mean are rare: of prose a token has three to five."""


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


def seems_to_fit(text: str, params: SamplingParams, max_model_len: int) -> bool:
    """Whether a text has some token, and hardly more than there is room for before what ``params``
    ask for: what is left to doubt is seen when it is tokenized."""
    room = max_model_len - max(params.max_tokens or 1, params.min_tokens)
    if room < 1 or not text.strip():
        return False
    try:
        return len(text.encode()) <= BYTES_A_TOKEN * room
    except UnicodeEncodeError:  # no tokenizer takes it
        return False
