"""Tokens of sequences on the device, so that steps with drafts need no result of the step before.

A step's rows begin after as many tokens as the step before has kept: `place` completes the step's
inputs, `accept` keeps samples, and `lookup` proposes drafts for the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels import checks
from tandem.kernels.errors import BadTensor
from tandem.kernels.registry import Backend, Op

MOST_TOKENS = 16
"""Maximum tokens of a row that `place` completes: its last one and its drafts."""
NONE = -1
"""Entry of `TokenHistory.drafts` without a draft."""


class TokenHistory(NamedTuple):
    """Tokens by row of the batch. The last row takes what pads a step."""

    token_ids: Tensor
    """int32 [rows + 1, columns], dense."""
    lengths: Tensor
    """int64 [rows + 1]: the known tokens of each row."""
    drafts: Tensor
    """int64 [rows + 1, most drafts], dense: tokens proposed after the known ones, then NONE."""


class StepTokens(NamedTuple):
    """Inputs of a step. Its rows are decodes of one token, then chunks."""

    rows: Tensor
    """int64 [rows]: row of the batch."""
    lens: Tensor
    """int64 [rows]: tokens up to the end of each row; negative if the history knows it."""
    chunk_starts: Tensor
    """int32 [chunks + 1]: first token of each chunk, after the decodes."""
    token_ids: Tensor
    """int64 [tokens]."""
    positions: Tensor
    """int64 [tokens]."""
    blocks: Tensor
    """int64 [groups, tokens]."""
    offsets: Tensor
    """int64 [tokens]: places in the blocks."""
    seq_lens: Tensor
    """int32 [rows]; of rows that the history knows the maximum."""
    block_tables: Tensor
    """int32 [groups, rows, columns], the last dimension dense."""
    draws: Tensor
    """int64 [3, decodes], output positions last; or empty."""
    block_size: int


_HERE = "tandem.kernels.drafts"
PLACE: Op[Callable[[TokenHistory, StepTokens, Tensor], None]] = Op(
    "drafts.place",
    {Backend.TORCH: f"{_HERE}.reference:place", Backend.TRITON: f"{_HERE}.triton:place"},
)
ACCEPT: Op[Callable[[TokenHistory, Tensor, Tensor, Tensor, Tensor, Tensor], None]] = Op(
    "drafts.accept",
    {Backend.TORCH: f"{_HERE}.reference:accept", Backend.TRITON: f"{_HERE}.triton:accept"},
)
LOOKUP: Op[Callable[[TokenHistory, Tensor, int, int, Tensor], None]] = Op(
    "drafts.lookup",
    {Backend.TORCH: f"{_HERE}.reference:lookup", Backend.TRITON: f"{_HERE}.triton:lookup"},
)


def place(history: TokenHistory, step: StepTokens, *, backend: Backend | None = None) -> Tensor:
    """Complete a step's rows whose `lens` are negative, in place; note the lengths of the others.

    Such a row has its last known token first, which is not changed, then its drafts. Return int64
    [rows]: tokens by which each row begins earlier than its `seq_lens` allowed.
    """
    _check(history)
    checks.shape("seq_lens", step.seq_lens, step.rows.shape[0])
    earlier = torch.empty_like(step.rows)
    PLACE.on(step.rows.device, backend)(history, step, earlier)
    return earlier


def accept(
    history: TokenHistory,
    rows: Tensor,
    spans: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    *,
    backend: Backend | None = None,
) -> Tensor:
    """Append each row's sampled tokens: those equal to its drafts, and the one after them.

    rows are int64 [n], rows of the batch; the last one is skipped. spans are int64 [2, n], dense in
    n: first sample of each row in token_ids (int64 [samples]), and the number of its samples.
    last_tokens are int64 [rows + 1]. Return int64 [3, n]: accepted drafts, compared drafts, and a
    row for `lookup`.
    """
    _check(history)
    checks.shape("spans", spans, 2, rows.shape[0])
    checks.shape("last_tokens", last_tokens, history.lengths.shape[0])
    results = torch.zeros(3, rows.shape[0], dtype=torch.int64, device=rows.device)
    ACCEPT.on(rows.device, backend)(history, rows, spans, token_ids, last_tokens, results)
    return results


def lookup(
    history: TokenHistory,
    rows: Tensor,
    least: int,
    most: int,
    counts: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Set each row's drafts to the tokens that followed its longest last n-gram of `least` to
    `most` tokens earlier; none if it is new. Write their number to counts (int64 [n]).

    Of several places, it is the last one that enough tokens follow, else the first. Source:
    Saxena, prompt lookup decoding (2023).
    """
    _check(history)
    checks.shape("counts", counts, rows.shape[0])
    LOOKUP.on(rows.device, backend)(history, rows, least, most, counts)


def _check(history: TokenHistory) -> None:
    count = history.lengths.shape[0]
    checks.shape("token_ids", history.token_ids, count, None)
    checks.shape("drafts", history.drafts, count, None)
    if not 0 < history.drafts.shape[1] < MOST_TOKENS:
        raise BadTensor(f"{history.drafts.shape[1]} drafts, expected 1 to {MOST_TOKENS - 1}")
