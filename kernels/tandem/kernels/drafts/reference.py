"""Drafts in plain torch, a row at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from . import NONE, StepTokens, TokenHistory


def place(history: TokenHistory, step: StepTokens, earlier: Tensor) -> None:
    """See the wrapper."""
    earlier.zero_()
    starts = step.chunk_starts.tolist()
    decodes = step.rows.shape[0] - len(starts) + 1
    for at, (row, end) in enumerate(zip(step.rows.tolist(), step.lens.tolist(), strict=True)):
        if end >= 0:
            history.lengths[row] = end
            continue
        chunk = at - decodes
        first = at if chunk < 0 else decodes + starts[chunk]
        count = 1 if chunk < 0 else starts[chunk + 1] - starts[chunk]
        begin = int(history.lengths[row]) - 1
        tokens = slice(first, first + count)
        positions = torch.arange(begin, begin + count, device=step.rows.device)
        step.token_ids[first + 1 : first + count] = history.drafts[row, : count - 1].clamp(min=0)
        step.positions[tokens] = positions
        blocks = step.block_tables[:, at, positions // step.block_size]
        step.blocks[:, tokens] = blocks.to(step.blocks.dtype)
        step.offsets[tokens] = positions % step.block_size
        earlier[at] = step.seq_lens[at] - (begin + count)
        step.seq_lens[at] = begin + count
        if step.draws.numel():
            step.draws[2, at] -= earlier[at]


def accept(
    history: TokenHistory,
    rows: Tensor,
    spans: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    results: Tensor,
) -> None:
    """See the wrapper."""
    for at, (row, first, count) in enumerate(zip(rows.tolist(), *spans.tolist(), strict=True)):
        if row == history.lengths.shape[0] - 1:
            continue
        sampled = token_ids[first : first + count]
        drafts = history.drafts[row, : count - 1]
        accepted = int((sampled[:-1] == drafts).long().cumprod(0).sum())
        known = int(history.lengths[row])
        kept = sampled[: accepted + 1]
        history.token_ids[row, known : known + accepted + 1] = kept.to(torch.int32)
        history.lengths[row] = known + accepted + 1
        last_tokens[row] = kept[-1]
        results[0, at] = accepted
        results[1, at] = (drafts != NONE).sum()


def lookup(history: TokenHistory, rows: Tensor, least: int, most: int, counts: Tensor) -> None:
    """See the wrapper."""
    wanted = history.drafts.shape[1]
    for at, row in enumerate(rows.tolist()):
        tokens = history.token_ids[row, : int(history.lengths[row])]
        found = continuation(tokens, least, most, wanted)
        history.drafts[row] = NONE
        history.drafts[row, : len(found)] = found.long()
        counts[at] = len(found)


def continuation(tokens: Tensor, least: int, most: int, wanted: int) -> Tensor:
    """Return up to `wanted` tokens that followed the longest last n-gram of `tokens` earlier."""
    known = len(tokens)
    if not known:
        return tokens
    ends = torch.nonzero(tokens[:-1] == tokens[-1]).flatten()
    found = ends[:0]
    for size in range(1, most + 1):
        if size >= least and len(ends):
            found = ends
        if not len(ends) or size >= known:
            break
        ends = ends[ends >= size]
        ends = ends[tokens[ends - size] == tokens[known - 1 - size]]
    if not len(found):
        return tokens[:0]
    whole = found[found + wanted < known]
    start = int(whole[-1] if len(whole) else found[0]) + 1
    return tokens[start : start + wanted]
