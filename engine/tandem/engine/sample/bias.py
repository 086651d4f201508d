"""The stage that adds what clients ask for to single logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.engine.sample.pairs import pairs_of
from tandem.engine.sample.rules import RowRules
from tandem.engine.sample.transfer import on_device


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
