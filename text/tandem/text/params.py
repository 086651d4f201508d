"""Sampling parameters that depend on the model's tokenizer."""

from __future__ import annotations

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams
from tandem.text.tokenizer import Tokenizer


def check_spaces(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raise InvalidParameter if the tokenizer adds spaces that were disabled."""
    without = not (params.spaces_between_special_tokens or params.skip_special_tokens)
    if without and not tokenizer.spells_bytes:
        raise InvalidParameter(
            "spaces_between_special_tokens", False, "true: this model's tokenizer has spaces"
        )


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters with ids of bad words, at the start of a text and after a space."""
    if not params.bad_words:
        return params
    found = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        bare = word.lstrip() or word
        for form in (bare, f" {bare}"):
            ids = tokenizer.encode(form, add_special_tokens=False, param="bad_words")
            if ids:
                found[tuple(ids)] = None
    return msgspec.structs.replace(params, bad_words_token_ids=tuple(found))
