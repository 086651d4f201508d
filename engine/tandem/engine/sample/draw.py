"""The choice: the best token of a row, or one drawn from the softmax of its logits.

Drawing is a race in two legs (docs/decisions: how a token is drawn). Tokens lie in groups of 128
by id. Leg one picks a group: argmax of (its probability mass over exponential noise). Leg two picks
a token in it: argmax of (logit - log of exponential noise). Both are the Gumbel-max trick, so the
outcome has exactly the softmax's distribution, while noise is made for groups and one group's
tokens instead of the whole vocabulary: a tenth of the time on a CPU. Noise comes from
(seed, choice, output position, purpose) and the index alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tandem.kernels.sampling.rng import exponentials

PART = 32
"""Rows that are widened to float32 at a time where the best token is looked for."""
GROUP = 128
"""Tokens of a group. Part of what a seed means: another size draws other tokens."""
GROUP_NOISE = 1 << 32
"""Index of the first group's noise, above any token id."""
_FINITE = torch.finfo(torch.float32).min


def best(logits: Tensor) -> Tensor:
    """The first of each row's equal maxima: any float [rows, vocabulary] to int64 [rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    parts = torch.split(logits.detach(), PART)
    found = [part.float().numpy().argmax(-1) for part in parts]  # ten times as fast as torch's
    return torch.from_numpy(np.concatenate(found))


def draw(logits: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """One token a draw; several draws may share a row of logits.

    Args:
        logits: float32 [rows, vocabulary], over the temperature; -inf is never drawn while
            anything else is there.
        keys: int64 [draws], from ``row_keys``.
        rows: int64 [draws], the row of ``logits`` of each draw.

    Returns:
        int64 [draws].
    """
    groups = _in_groups(logits)
    noise = exponentials(keys.unsqueeze(1), _indices(groups.shape[1], logits.device) + GROUP_NOISE)
    group = (_masses(groups)[rows] / noise).argmax(-1)
    start = (group * GROUP).unsqueeze(1)
    noise = exponentials(keys.unsqueeze(1), start + _indices(GROUP, logits.device))
    token = (groups[rows, group] - noise.log_()).argmax(-1)
    return group * GROUP + token


def _in_groups(logits: Tensor) -> Tensor:
    """[rows, groups, GROUP], the last group filled up with -inf."""
    missing = -logits.shape[1] % GROUP
    padded = pad(logits, (0, missing), value=-math.inf) if missing else logits
    return padded.reshape(logits.shape[0], -1, GROUP)


def _masses(groups: Tensor) -> Tensor:
    """Probability mass of each group, up to a factor a row: float32 [rows, groups]."""
    peak = groups.amax((1, 2), keepdim=True).clamp_(min=_FINITE)
    return (groups - peak).exp_().sum(-1)


def _indices(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)
