"""Log-probabilities with the texts and bytes that OpenAI's answers have.

Called by ``output_processor`` for requests that ask; the router renders what it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import msgspec

from tandem.protocol.outputs import TokenLogprobs
from tandem.text.tokenizer import Tokenizer


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token at one position."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    rank: int
    """1 for the best token of the vocabulary."""
    decoded_token: str
    """Text of the token, with U+FFFD for parts of characters."""
    bytes: bytes
    """The token's bytes, which joined over positions give the text."""


class PositionLogprobs(Mapping[int, Logprob]):
    """Mapping of one position by token id: the sampled token, and the best ones."""

    __slots__ = ("sampled", "top")

    def __init__(self, sampled: Logprob, top: tuple[Logprob, ...]) -> None:
        self.sampled = sampled
        self.top = top
        """Best tokens, best first, as many as requested."""

    def __getitem__(self, token_id: int) -> Logprob:
        for each in chain((self.sampled,), self.top):
            if each.token_id == token_id:
                return each
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield from dict.fromkeys((self.sampled.token_id, *(each.token_id for each in self.top)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"PositionLogprobs(sampled={self.sampled!r}, top={self.top!r})"


def with_texts(tokenizer: Tokenizer, position: TokenLogprobs) -> PositionLogprobs:
    """Return ``position`` with the text of every token."""

    def of(token_id: int, logprob: float, rank: int) -> Logprob:
        data = tokenizer.token_bytes(token_id)
        return Logprob(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            decoded_token=data.decode(errors="replace"),
            bytes=data,
        )

    best = zip(position.top_ids, position.top_logprobs, strict=True)
    return PositionLogprobs(
        of(position.token_id, position.logprob, position.rank),
        tuple(of(token_id, value, rank) for rank, (token_id, value) in enumerate(best, start=1)),
    )
