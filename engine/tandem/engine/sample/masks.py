"""Stages that take tokens away: allowed ids, then bad words, then ends that come too early.

Together they may take everything (the one allowed id is a bad word). Then the best allowed token
stays: an answer has to come, and what was allowed outranks what was unwelcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sample.pairs import pairs_of
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import index_on

_LOWEST = -1e30
"""What an allowed token counts for that the model itself rules out: still above what is not
allowed, and far enough from float32's end for penalties and a low temperature."""


def mask(logits: Tensor, rules: Sequence[RowRules | None], positions: Sequence[int]) -> None:
    """All three stages, in place on float32 [rows, vocabulary]; rules and positions per row."""
    keep_allowed(logits, rules)
    forbidden = [_forbidden(each, at) for each, at in zip(rules, positions, strict=True)]
    rows = [row for row, ids in enumerate(forbidden) if ids.numel()]
    if rows:
        _forbid(logits, rows, [forbidden[row] for row in rows])


def keep_allowed(logits: Tensor, rules: Sequence[RowRules | None]) -> None:
    """-inf for every token that is not among its row's allowed ones, in place."""
    allowed = {
        row: each.allowed
        for row, each in enumerate(rules)
        if each is not None and each.allowed is not None
    }
    if not allowed:
        return
    places = pairs_of(list(allowed), list(allowed.values()), logits.device)
    kept = logits[places].clamp(min=_LOWEST)
    logits[index_on(list(allowed), logits.device)] = -math.inf
    logits[places] = kept


def _forbidden(rules: RowRules | None, position: int) -> Tensor:
    if rules is None:
        return torch.empty(0, dtype=torch.int64)
    words = rules.forbidden_words()
    return torch.cat([words, rules.end_ids]) if rules.holds_back_end(position) else words


def _forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Tensor]) -> None:
    """-inf at the tokens of each row, but a row's best token comes back if nothing is left."""
    index = index_on(rows, logits.device)
    best = logits[index].argmax(-1)
    value = logits[index, best]
    logits[pairs_of(rows, tokens, logits.device)] = -math.inf
    empty = logits[index].amax(-1) == -math.inf
    logits[index, best] = torch.where(empty, value, logits[index, best])
