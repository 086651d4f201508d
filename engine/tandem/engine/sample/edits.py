"""Every stage that changes logits before the choice, in order: masks, bias, penalties.

Masks take tokens away: all but allowed ids, then bad words, then ends that come too early, then
what a grammar does not allow. Together they may take everything (the one allowed id is a bad word).
Then the best allowed token stays: an answer has to come, and what was allowed outranks what was
unwelcome. A grammar outranks all: where nothing of it is left by the others, the best token that it
allows comes back. Stages touch all rows that they concern with one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import index_on, on_device
from tandem.kernels.sampling import Penalties, penalize

_LOWEST = -1e30
"""What an allowed token counts for that the model itself rules out: still above what is not
allowed, and far enough from float32's end for penalties and a low temperature."""


def edit(
    logits: Tensor, batch: SamplingBatch, rows: Sequence[int], positions: Sequence[int]
) -> None:
    """Apply the rules of batch rows ``rows``, in place on float32 [rows, vocabulary].

    ``positions`` are the output positions that the rows are drawn for.
    """
    rules = [batch.rules_at(row, at) for row, at in zip(rows, positions, strict=True)]
    bounded = [at for at, row in enumerate(rows) if row in batch.masks] if batch.masks else []
    grammar = None
    if bounded:
        words = torch.stack([batch.masks[rows[at]] for at in bounded])
        grammar = Bounds.of(logits, bounded, words)
    if any(each is not None for each in rules):
        mask(logits, rules, positions)
    if grammar is not None:
        keep_bounded(logits, grammar)
    if any(each is not None for each in rules):
        add_bias(logits, rules)
        add_penalties(logits, rules, batch, rows)


def mask(logits: Tensor, rules: Sequence[RowRules | None], positions: Sequence[int]) -> None:
    """Allowed ids, bad words and ends, in place on float32 [rows, vocabulary]; rules and positions
    per row."""
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


class Bounds(NamedTuple):
    """What grammars allow of some rows of logits, and their best tokens among it."""

    rows: Tensor
    """int64 [bounded]."""
    allowed: Tensor
    """bool [bounded, vocabulary]."""
    best: Tensor
    """int64 [bounded]."""
    value: Tensor
    """float32 [bounded]: the best token's logit, as it was before other masks."""

    @classmethod
    def of(cls, logits: Tensor, rows: Sequence[int], words: Tensor) -> Bounds:
        """From int32 ``words`` [bounded, words] on the host and float32 logits [rows, vocabulary]
        that no mask has touched."""
        index = index_on(rows, logits.device)
        eights = on_device(words.view(torch.uint8), logits.device).unsqueeze(-1)
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = (eights >> places).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
        allowed = bits.bool()
        raw = logits[index].clamp_(min=_LOWEST).masked_fill_(~allowed, -math.inf)
        best = raw.argmax(-1)
        return cls(index, allowed, best, raw.gather(1, best[:, None]).squeeze(1))


def keep_bounded(logits: Tensor, bounds: Bounds) -> None:
    """-inf for every token that a row's grammar does not allow, in place; its best token comes back
    if nothing is left."""
    kept = logits[bounds.rows].masked_fill_(~bounds.allowed, -math.inf)
    empty = kept.amax(-1) == -math.inf
    there = kept.gather(1, bounds.best[:, None]).squeeze(1)
    kept.scatter_(1, bounds.best[:, None], torch.where(empty, bounds.value, there)[:, None])
    logits[bounds.rows] = kept


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


def add_bias(logits: Tensor, rules: Sequence[RowRules | None]) -> None:
    """Add each row's bias, in place on float32 [rows, vocabulary]."""
    biases = {
        row: each.bias
        for row, each in enumerate(rules)
        if each is not None and each.bias is not None
    }
    if not biases:
        return
    places = pairs_of(list(biases), [tokens for tokens, _ in biases.values()], logits.device)
    values = torch.cat([numbers for _, numbers in biases.values()])
    logits[places] += on_device(values, logits.device)


def add_penalties(
    logits: Tensor, rules: Sequence[RowRules | None], batch: SamplingBatch, rows: Sequence[int]
) -> None:
    """Repetition (prompt and output), then frequency and presence (output), in place.

    ``logits`` are float32 [rows, vocabulary]; ``rules`` and ``rows`` (of the batch) go with them.
    """
    seen = {
        row: each.seen
        for row, each in enumerate(rules)
        if each is not None and each.seen is not None and each.seen.tokens.numel()
    }
    if not seen:
        return
    device, columns = logits.device, torch.tensor(rows)
    places = pairs_of(list(seen), [each.tokens for each in seen.values()], device)
    penalties = Penalties(
        rows=places.rows,
        tokens=places.tokens,
        counts=on_device(torch.cat([each.counts for each in seen.values()]), device),
        repetition=on_device(batch.repetition[columns], device),
        frequency=on_device(batch.frequency[columns], device),
        presence=on_device(batch.presence[columns], device),
    )
    penalize(logits, penalties)


class Pairs(NamedTuple):
    """Places in logits [rows, vocabulary]; usable as an index."""

    rows: Tensor
    """int64 [pairs]."""
    tokens: Tensor
    """int64 [pairs]."""


def pairs_of(rows: Sequence[int], tokens: Sequence[Tensor], device: torch.device) -> Pairs:
    """Each row of ``rows`` with each token of its entry in ``tokens`` (int64, at least one row)."""
    counts = torch.tensor([each.numel() for each in tokens])
    repeated = torch.tensor(rows).repeat_interleave(counts)
    return Pairs(on_device(repeated, device), on_device(torch.cat(list(tokens)), device))
