"""Stages that change logits before the choice, in order: masks, bias, penalties.

Masks are allowed ids, bad words, early ends, grammars. If they exclude every token, the best
allowed one stays: allowed ids precede bad words and early ends, and a grammar precedes all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.sample.batch import SamplingBatch
from tandem.engine.sample.bounds import Bounds
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.seen import SeenTokens
from tandem.engine.sample.transfer import index_on, on_device
from tandem.kernels.sampling import LOWEST, Penalties, keep_bits, penalize


def edit(
    logits: Tensor, batch: SamplingBatch, rows: Sequence[int], positions: Sequence[int]
) -> None:
    """Apply external processors, then rules, to batch rows ``rows``, in place on float32 [rows,
    vocabulary].

    ``positions`` are the rows' output positions.
    """
    if batch.processors is not None:
        batch.processors.apply(logits, rows, keeps_argmax=False)
    rules = [batch.rules_at(row, at) for row, at in zip(rows, positions, strict=True)]
    ruled = any(each is not None for each in rules)
    bounds = bounds_of(batch, rows, logits.device) if batch.masks else None
    best = bounds.best(logits) if ruled and bounds is not None else None
    if ruled:
        mask(logits, rules, positions)
    if bounds is not None:
        bounds.keep(logits, best)
    if ruled:
        add_bias(logits, rules)
        add_penalties(logits, rules, batch, rows)


def bounds_of(batch: SamplingBatch, rows: Sequence[int], device: torch.device) -> Bounds | None:
    """Return the grammars' bounds of the rows; None if no row has one."""
    bounded, places = bounded_rows(batch, rows)
    if not bounded:
        return None
    if batch.bounds is not None:
        return batch.bounds.of(bounded, places)
    words = batch.mask_words
    if places != list(range(len(words))):
        words = words[places]
    return Bounds.of(bounded, words, device)


def bounded_rows(batch: SamplingBatch, rows: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the bounded rows of logits, and the place of each one's words."""
    found = [(at, batch.masks[row]) for at, row in enumerate(rows) if row in batch.masks]
    return [at for at, _ in found], [place for _, place in found]


def mask(logits: Tensor, rules: Sequence[RowRules | None], positions: Sequence[int]) -> None:
    """Mask allowed ids, bad words and ends, in place on float32 [rows, vocabulary]; rules and
    positions per row."""
    keep_allowed(logits, rules)
    forbidden = [_forbidden(each, at) for each, at in zip(rules, positions, strict=True)]
    rows = [row for row, ids in enumerate(forbidden) if ids.numel()]
    if rows:
        _forbid(logits, rows, [forbidden[row] for row in rows])


def keep_allowed(logits: Tensor, rules: Sequence[RowRules | None]) -> None:
    """Set every token that is not among its row's allowed ones to -inf, in place."""
    allowed = {
        row: ids
        for row, each in enumerate(rules)
        if each is not None and (ids := each.allowed_now) is not None
    }
    few = {row: each.token_ids for row, each in allowed.items() if each.are_few}
    if few:
        places = pairs_of(list(few), list(few.values()), logits.device)
        kept = logits[places].clamp(min=LOWEST)
        logits.index_fill_(0, index_on(list(few), logits.device), -math.inf)
        logits[places] = kept
    many = {row: each for row, each in allowed.items() if not each.are_few}
    if many:
        words = [each.words_on(logits.device, logits.shape[1]) for each in many.values()]
        keep_bits(logits, torch.stack(words), index_on(list(many), logits.device))


def _forbidden(rules: RowRules | None, position: int) -> Tensor:
    if rules is None:
        return torch.empty(0, dtype=torch.int64)
    words = rules.forbidden_words()
    return torch.cat([words, rules.end_ids]) if rules.holds_back_end(position) else words


def _forbid(logits: Tensor, rows: Sequence[int], tokens: Sequence[Tensor]) -> None:
    index = index_on(rows, logits.device)
    best = logits[index].argmax(-1)
    value = logits[index, best]
    # A tensor of the device, as a number would be copied to it, which waits for all steps.
    lowest = logits.new_full((), -math.inf)
    logits[pairs_of(rows, tokens, logits.device)] = lowest
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
    """Penalize repetition (prompt and output), frequency and presence (output), in place.

    ``logits`` are float32 [rows, vocabulary]; ``rules`` and batch ``rows`` are parallel to them.
    """
    seen = {
        row: each.seen
        for row, each in enumerate(rules)
        if each is not None and each.seen is not None
    }
    if not seen:
        return
    columns = torch.tensor(rows)
    frequency, presence = batch.frequency[columns], batch.presence[columns]
    with_prompt = [each for each in seen.items() if each[1].prompt is not None]
    if with_prompt:
        repetition = on_device(batch.repetition[columns], logits.device)
        _penalize_repetition(logits, dict(with_prompt), repetition)
    counts = ((frequency != 0) | (presence != 0)).tolist()
    counted = {row: each for row, each in seen.items() if counts[row] and each.tokens.numel()}
    if counted:
        _penalize_counts(logits, counted, frequency, presence)


def _penalize_repetition(
    logits: Tensor, seen: Mapping[int, SeenTokens], repetition: Tensor
) -> None:
    device = logits.device
    prompts = [each.prompt.on(device) for each in seen.values() if each.prompt is not None]
    lengths = [each.numel() for each in prompts]
    repeated = torch.repeat_interleave(
        index_on(list(seen), device), index_on(lengths, device), output_size=sum(lengths)
    )
    new = pairs_of(list(seen), [each.new_tokens for each in seen.values()], device)
    tokens, off = torch.cat([*prompts, new.tokens]), torch.zeros_like(repetition)
    penalties = Penalties(
        rows=torch.cat([repeated, new.rows]),
        tokens=tokens,
        counts=torch.zeros(tokens.shape, device=device),
        repetition=repetition,
        frequency=off,
        presence=off,
    )
    penalize(logits, penalties)


def _penalize_counts(
    logits: Tensor, seen: Mapping[int, SeenTokens], frequency: Tensor, presence: Tensor
) -> None:
    device = logits.device
    places = pairs_of(list(seen), [each.tokens for each in seen.values()], device)
    penalties = Penalties(
        rows=places.rows,
        tokens=places.tokens,
        counts=on_device(torch.cat([each.counts for each in seen.values()]), device),
        repetition=torch.ones(frequency.shape, device=device),
        frequency=on_device(frequency, device),
        presence=on_device(presence, device),
    )
    penalize(logits, penalties)


class Pairs(NamedTuple):
    """Places in logits [rows, vocabulary]; usable as an index."""

    rows: Tensor
    """int64 [pairs]."""
    tokens: Tensor
    """int64 [pairs]."""


def pairs_of(rows: Sequence[int], tokens: Sequence[Tensor], device: torch.device) -> Pairs:
    """Pair each row of ``rows`` with each token of its entry in ``tokens`` (int64, not empty)."""
    counts = torch.tensor([each.numel() for each in tokens])
    repeated = torch.tensor(rows).repeat_interleave(counts)
    return Pairs(on_device(repeated, device), on_device(torch.cat(list(tokens)), device))
