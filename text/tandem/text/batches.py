"""Texts of a batch made to ids together: one call, in which the tokenizer uses every core."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.protocol.errors import InvalidParameter
from tandem.text.prompts import Prompt, TextPrompt, TokensPrompt
from tandem.text.tokenizer import Tokenizer


def with_ids(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, most_chars: int, add_special_tokens: bool
) -> list[Prompt]:
    """``prompts`` with ids in the place of texts of at most ``most_chars`` characters.

    What cannot be made to ids stays a text: who processes it says why it is refused.
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
