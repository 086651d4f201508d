"""The choice in Triton: two launches for any number of rows.

Roofline: the logits read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tandem.kernels.launch import dependent
from tandem.kernels.sampling.rng import GROUP, GROUP_NOISE

from .triton_kernels import best_of_groups, group_stats, race

AT_ONCE = 16
"""Groups of a program of a pass over logits; twice that for maxima only."""


class GroupStats(NamedTuple):
    """Results of one pass over logits [rows, vocabulary], a number a group of GROUP tokens."""

    peaks: Tensor
    """float32 [rows, groups]."""
    masses: Tensor | None
    """float32 [rows, groups], sums of exp(logit - peak)."""
    above: Tensor | None
    """int32 [rows, groups], logits above the chosen token's."""


def best(logits: Tensor) -> Tensor:
    """See the wrapper."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        peaks = stats_of(logits, mass=False).peaks
        best_of_groups[(rows,)](
            logits,
            peaks,
            tokens,
            logits.stride(0),
            vocab,
            peaks.shape[1],
            GROUP=GROUP,
            GROUPS=triton.next_power_of_2(peaks.shape[1]),
            **dependent(logits.device),
        )
    return tokens


def draw(
    logits: Tensor, keys: Tensor, rows: Tensor, temperature: Tensor | None, floor: Tensor | None
) -> Tensor:
    """See the wrapper."""
    tokens = torch.empty_like(rows)
    if rows.numel():
        stats = stats_of(logits, temperature, floor)
        race[(rows.numel(),)](
            logits,
            _or(temperature, logits),
            _or(floor, logits),
            keys,
            rows,
            stats.peaks,
            stats.masses,
            tokens,
            logits.stride(0),
            logits.shape[1],
            stats.peaks.shape[1],
            GROUP=GROUP,
            GROUPS=triton.next_power_of_2(stats.peaks.shape[1]),
            GROUP_NOISE=GROUP_NOISE,
            SCALED=temperature is not None,
            FLOORED=floor is not None,
            num_warps=8,
            **dependent(logits.device),
        )
    return tokens


def stats_of(
    logits: Tensor,
    temperature: Tensor | None = None,
    floor: Tensor | None = None,
    *,
    chosen: Tensor | None = None,
    mass: bool = True,
) -> GroupStats:
    """Compute the statistics of each group in one pass over at least one row of logits.

    With `chosen`, int64 [rows], the result has `above`.
    """
    rows, vocab = logits.shape
    groups = triton.cdiv(vocab, GROUP)
    peaks = torch.empty(rows, groups, dtype=torch.float32, device=logits.device)
    masses = torch.empty_like(peaks) if mass else None
    above = None if chosen is None else torch.empty_like(peaks, dtype=torch.int32)
    at_once = AT_ONCE if mass else 2 * AT_ONCE
    group_stats[(triton.cdiv(groups, at_once), rows)](
        logits,
        _or(temperature, logits),
        _or(floor, logits),
        _or(chosen, logits),
        peaks,
        _or(masses, peaks),
        _or(above, peaks),
        logits.stride(0),
        vocab,
        groups,
        GROUP=GROUP,
        AT_ONCE=at_once,
        SCALED=temperature is not None,
        FLOORED=floor is not None,
        MASS=mass,
        RANK=chosen is not None,
        **dependent(logits.device),
    )
    return GroupStats(peaks, masses, above)


def _or(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """Return ``tensor``, or ``unread`` as the pointer of a tensor that the kernel does not read."""
    return unread if tensor is None else tensor
