"""Tokenization of a batch of texts in one call, in which the tokenizer uses every core."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.errors import InvalidParameter
from tandem.text.prompts import Prompt, TextPrompt, TokensPrompt
from tandem.text.tokenizer import Tokenizer


def with_ids(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, most_chars: int, add_special_tokens: bool
) -> list[Prompt]:
    """Return ``prompts`` with texts of at most ``most_chars`` characters replaced by ids.

    A text that cannot be tokenized stays a text: the code that processes it raises the error.
    """
    texts = {
        at: each.text
        for at, each in enumerate(prompts)
        if isinstance(each, TextPrompt) and len(each.text) <= most_chars
    }
    found = list(prompts)
    try:
        encoded = tokenizer.encode_all([*texts.values()], add_special_tokens=add_special_tokens)
    except InvalidParameter:
        return found
    for (at, text), ids in zip(texts.items(), encoded, strict=True):
        if ids:
            found[at] = TokensPrompt(tuple(ids), text)
    return found
