"""Drafts in Triton. Roofline: a launch; of a lookup, the rows' tokens read once."""

from __future__ import annotations

from torch import Tensor

from tandem.kernels.launch.launcher import Launcher

from . import MOST_TOKENS, StepTokens, TokenHistory
from .triton_kernels import accept_rows, look_up_rows, place_rows

_BLOCK = 1024
_place, _accept, _look_up = Launcher(place_rows), Launcher(accept_rows), Launcher(look_up_rows)


def place(history: TokenHistory, step: StepTokens, earlier: Tensor) -> None:
    """See the wrapper."""
    rows, chunks = step.rows.shape[0], step.chunk_starts.shape[0] - 1
    if not rows:
        return
    tables = step.block_tables
    _place(
        (rows,),
        *history,
        step.rows,
        step.lens,
        step.chunk_starts,
        step.token_ids,
        step.positions,
        step.blocks,
        step.offsets,
        step.seq_lens,
        tables,
        step.draws,
        earlier,
        rows - chunks,
        history.drafts.shape[1],
        tables.shape[0],
        step.blocks.shape[1],
        tables.stride(0),
        tables.stride(1),
        step.draws.numel(),
        BLOCK_SIZE=step.block_size,
        WIDTH=MOST_TOKENS,
        num_warps=1,
    )


def accept(
    history: TokenHistory,
    rows: Tensor,
    spans: Tensor,
    token_ids: Tensor,
    last_tokens: Tensor,
    results: Tensor,
) -> None:
    """See the wrapper."""
    count = rows.shape[0]
    if count:
        _accept(
            (count,),
            *history,
            rows,
            spans,
            token_ids,
            last_tokens,
            results,
            count,
            spans.stride(0),
            history.lengths.shape[0] - 1,
            history.token_ids.shape[1],
            history.drafts.shape[1],
            WIDTH=MOST_TOKENS,
            num_warps=1,
        )


def lookup(history: TokenHistory, rows: Tensor, least: int, most: int, counts: Tensor) -> None:
    """See the wrapper."""
    if rows.shape[0]:
        _look_up(
            (rows.shape[0],),
            *history,
            rows,
            counts,
            history.token_ids.shape[1],
            history.drafts.shape[1],
            LEAST=least,
            MOST=most,
            WIDTH=MOST_TOKENS,
            BLOCK=_BLOCK,
            num_warps=8,
        )
