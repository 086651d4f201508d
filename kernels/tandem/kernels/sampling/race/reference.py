"""The choice in plain torch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.sampling.rng import GROUP, GROUP_NOISE, exponentials

PART = 32
"""Rows widened to float32 per pass that finds the best token."""
_FINITE = torch.finfo(torch.float32).min


def best(logits: Tensor) -> Tensor:
    """See the wrapper."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    parts = torch.split(logits.detach(), PART)
    found = [part.float().numpy().argmax(-1) for part in parts]  # much faster than torch's
    return torch.from_numpy(np.concatenate(found))


def draw(
    logits: Tensor, keys: Tensor, rows: Tensor, temperature: Tensor | None, floor: Tensor | None
) -> Tensor:
    """See the wrapper."""
    groups = _in_groups(kept(logits, temperature, floor))
    noise = exponentials(keys.unsqueeze(1), _indices(groups.shape[1], logits.device) + GROUP_NOISE)
    group = (_masses(groups)[rows] / noise).argmax(-1)
    start = (group * GROUP).unsqueeze(1)
    noise = exponentials(keys.unsqueeze(1), start + _indices(GROUP, logits.device))
    token = (groups[rows, group] - noise.log_()).argmax(-1)
    return (group * GROUP + token).clamp_(max=logits.shape[1] - 1)


def kept(logits: Tensor, temperature: Tensor | None, floor: Tensor | None) -> Tensor:
    """Return float32 logits over the temperature, -inf below the floor; a view if nothing
    changes."""
    values = logits.float()
    if temperature is not None:
        values = values / temperature.unsqueeze(1)
    if floor is not None:
        values = values.masked_fill(values < floor.unsqueeze(1), -math.inf)
    return values


def _in_groups(logits: Tensor) -> Tensor:
    """Return [rows, groups, GROUP], the last group filled up with -inf."""
    missing = -logits.shape[1] % GROUP
    padded = pad(logits, (0, missing), value=-math.inf) if missing else logits
    return padded.reshape(logits.shape[0], padded.shape[1] // GROUP, GROUP)


def _masses(groups: Tensor) -> Tensor:
    """Return the probability mass of each group, up to a factor a row: float32 [rows, groups]."""
    peak = groups.amax((1, 2), keepdim=True).clamp_(min=_FINITE)
    return (groups - peak).exp_().sum(-1)


def _indices(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
