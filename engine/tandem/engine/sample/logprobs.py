"""Log-probabilities of the raw logits, in tensors until they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.sample.transfer import index_on
from tandem.kernels.sampling import score_tokens
from tandem.protocol.outputs import TokenLogprobs

PART = 32
"""Rows scored per pass, which bounds the copies of the logits."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Scores of some draws, on the logits' device."""

    draws: tuple[int, ...]
    """Indices of the scored draws in the step, ascending."""
    counts: tuple[int, ...]
    """Number of best tokens that each requested."""
    token_ids: Tensor
    """int64 [draws]."""
    logprobs: Tensor
    """float32 [draws]."""
    ranks: Tensor
    """int64 [draws]; equals share the better rank."""
    top_ids: Tensor
    """int64 [draws, most requested], best first; of equals the lowest id first."""
    top_logprobs: Tensor
    """float32, parallel to ``top_ids``."""

    def to_host(self) -> LogprobTensors:
        """Return a copy on its way to the host; wait for the device before it is read."""
        names = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
        moved = {each: getattr(self, each).to("cpu", non_blocking=True) for each in names}
        return replace(self, **moved)

    def by_draw(self) -> dict[int, TokenLogprobs]:
        """Return the scores as the protocol has them; wait for the device."""
        return dict(zip(self.draws, self.as_list(), strict=True))

    def as_list(self) -> list[TokenLogprobs]:
        """Return the scores in the order of ``draws``; wait for the device."""
        columns = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            self.counts,
            strict=True,
        )
        return [
            TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
            for token, logprob, rank, ids, values, count in columns
        ]


def score(
    logits: Tensor,
    token_ids: Tensor,
    *,
    rows: Sequence[int],
    draws: Sequence[int],
    counts: Sequence[int],
) -> LogprobTensors:
    """Score drawn tokens.

    ``logits`` are raw [rows, vocabulary], ``token_ids`` int64 of every draw. ``rows``, ``draws``
    and ``counts`` are each scored draw's row, index and number of best tokens; at least one.
    """
    chosen = token_ids[index_on(draws, token_ids.device)]
    index = index_on(rows, logits.device)
    top = min(max(counts), logits.shape[1])
    parts = [
        score_tokens(logits[at], ids, top)
        for at, ids in zip(torch.split(index, PART), torch.split(chosen, PART), strict=True)
    ]
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return LogprobTensors(tuple(draws), tuple(counts), chosen, *columns)


def score_prompt(logits: Tensor, next_token_ids: Sequence[int], n: int) -> LogprobTensors:
    """Score a prompt's tokens: row i of ``logits`` [positions, vocabulary] predicts token i.

    ``n`` best tokens each; at least one position.
    """
    every = range(len(next_token_ids))
    tokens = index_on(next_token_ids, logits.device)
    return score(logits, tokens, rows=every, draws=every, counts=[n] * len(every))


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], n: int) -> list[TokenLogprobs]:
    """Return the scores of ``score_prompt``, also of no position. Wait for the device."""
    return score_prompt(logits, next_token_ids, n).as_list() if next_token_ids else []
