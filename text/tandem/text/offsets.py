"""Offsets of each token's text in the text that a client receives, for ``text_offset``.

They are not sums of token lengths: hidden tokens have no text, and a token with a part of a
character starts at that character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.text.tokenizer import Tokenizer


class AnswerOffsets:
    """Offsets of one choice's tokens, in characters from ``start`` on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        context: Sequence[int],
        start: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skip_special_tokens, context=context
        )
        self._end = start

    def place(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.feed(token_id))
        return offsets


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt as it is shown before its answer; ``offsets`` has one entry per token."""

    text: str
    offsets: list[int]


def echoed_prompt(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> EchoedPrompt:
    """Return the client's text with offsets, decoded from the tokens if it is not known or
    truncated.
    """
    pieces = _spelled(tokenizer, token_ids)
    if text is not None:
        offsets = _aligned(tokenizer, text, token_ids, pieces)
        if offsets is None:
            offsets = tokenizer.offsets(text, token_ids)
        if offsets is not None:
            return EchoedPrompt(text, offsets)
    return EchoedPrompt("".join(pieces), _begins(pieces)[: len(token_ids)])


def _spelled(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special ones written out, and the rest as one more piece."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    return [*map(detokenizer.feed, token_ids), detokenizer.end()]


def _begins(pieces: Sequence[str]) -> list[int]:
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(piece)
    return offsets


def _aligned(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], pieces: Sequence[str]
) -> list[int] | None:
    """Return offsets in ``text``. None if it differs from the tokens' text, except special
    tokens."""
    offsets: list[int] = []
    at = 0
    for token_id, piece in zip(token_ids, pieces, strict=False):
        offsets.append(at)
        if text.startswith(piece, at):
            at += len(piece)
        elif token_id not in tokenizer.special_ids:
            return None
    return offsets if text[at:] == pieces[-1] else None
