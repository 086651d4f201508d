"""Where the text of each token begins in the text that a client sees.

Not a sum of lengths: a token that is added (BOS) or hidden (end of text) takes no place in it, one
that holds a part of a character begins where the character does, and what a stop string cut off
begins at the end. For OpenAI's ``text_offset``; called by the router for completions with logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.text.tokenizer import Tokenizer


class AnswerOffsets:
    """Offsets of one choice's tokens as they come; in characters from ``start`` on."""

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
        """Where each of the next tokens begins."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.feed(token_id))
        return offsets


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as it is shown before its answer."""

    text: str
    offsets: list[int]
    """One per token."""


def echoed_prompt(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> EchoedPrompt:
    """The text that the client gave, or what the tokens spell where it gave ids or had it cut."""
    pieces = _spelled(tokenizer, token_ids)
    if text is not None:
        offsets = _aligned(tokenizer, text, token_ids, pieces)
        if offsets is None:
            offsets = tokenizer.offsets(text, token_ids)
        if offsets is not None:
            return EchoedPrompt(text, offsets)
    return EchoedPrompt("".join(pieces), _begins(pieces)[: len(token_ids)])


def _spelled(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text, special ones written out; one more for what is left."""
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
    """Offsets in ``text``, where it is what the tokens spell but for special ones between."""
    offsets: list[int] = []
    at = 0
    for token_id, piece in zip(token_ids, pieces, strict=False):
        offsets.append(at)
        if text.startswith(piece, at):
            at += len(piece)
        elif token_id not in tokenizer.special_ids:
            return None
    return offsets if text[at:] == pieces[-1] else None
