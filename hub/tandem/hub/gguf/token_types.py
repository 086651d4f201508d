"""Types of the tokens of a GGUF vocabulary."""

from enum import IntEnum
from typing import Any

from tandem.hub.gguf.reader import GgufModel


class TokenType(IntEnum):
    """Relevant values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    CONTROL = 3
    """Never the result of plain text."""
    USER_DEFINED = 4
    """Matched whole in text, and shown."""


def token_types(model: GgufModel, num_tokens: int) -> list[Any]:
    """Return the type of each token, or nothing. Raises UnsupportedModel for another length."""
    kinds = model.get("tokenizer.ggml.token_type", [])
    if not isinstance(kinds, list) or len(kinds) not in (0, num_tokens):
        allowed = f"one number for each of the {num_tokens} tokens"
        raise model.refusal("tokenizer.ggml.token_type", kinds, allowed)
    return kinds
