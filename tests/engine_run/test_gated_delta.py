"""The gated delta rule against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.kernels.errors import BadTensor
from tandem.kernels.gated_delta import DeltaShape, Spans, gated_delta

SHAPE = DeltaShape(2, 6, 4, 5, 4)
NUMBERS = 6 * 5 + 35
"""Numbers of a head's state; a few are padding."""


class Sequence:
    """One sequence in float64, token by token."""

    def __init__(self) -> None:
        self.state = torch.zeros(4, 6, 5, dtype=torch.float64)
        self.before = [torch.zeros(SHAPE.channels, dtype=torch.float64)] * 3

    def token(self, x: Tensor, decay: Tensor, beta: Tensor, conv: Tensor) -> Tensor:
        taps = torch.stack([*self.before, x])
        self.before = [*self.before[1:], x]
        mixed = (taps * conv.T).sum(0)
        mixed = mixed * mixed.sigmoid()
        q, k, v = mixed[:12].view(2, 6), mixed[12:24].view(2, 6), mixed[24:].view(4, 5)
        q, k = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (q, k))
        out = []
        for head in range(4):
            key, state = k[head // 2], self.state[head] * decay[head].exp()
            state = state + torch.outer(key, beta[head] * (v[head] - key @ state))
            self.state[head] = state
            out.append(q[head // 2] @ state / 6**0.5)
        return torch.stack(out)


def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.manual_seed(tokens)
    qkv = torch.randn(tokens, SHAPE.channels, generator=seed) * 2
    decay = -torch.rand(tokens, 4, generator=seed) * 3
    return qkv, decay, torch.rand(tokens, 4, generator=seed)


def run(pages: Tensor, blocks: list[int], lens: list[int], counts: list[int], **changes: int):
    """Run a step of rows with these blocks, lengths and tokens; decodes are first."""
    decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
    bounds = torch.tensor([0, *counts[decodes:]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    longest = changes.get("longest", max(counts[decodes:], default=0))
    spans = Spans.of(decodes, bounds, torch.tensor(lens, dtype=torch.int32), longest)
    x = inputs(sum(counts) + changes.get("padding", 0))
    where = torch.tensor(blocks, dtype=torch.int32)
    return x, gated_delta(*x, CONV, pages, where, spans, SHAPE)


CONV = torch.randn(SHAPE.channels, 4, generator=torch.manual_seed(1)) / 2


def pages_of_nan() -> Tensor:
    """Return blocks that are farther apart than their numbers."""
    return torch.full((9, 4 * NUMBERS + 7), torch.nan)[:, : 4 * NUMBERS].view(9, 4, NUMBERS)


@pytest.mark.parametrize("padding", [0, 5])
def test_steps_are_the_loop_over_tokens(padding):
    """Chunks about the rule's blocks, decodes, and chunks again go on from each row's block."""
    pages, there = pages_of_nan(), {block: Sequence() for block in (7, 2, 5)}
    lens = dict.fromkeys(there, 0)
    for counts in ([70, 2, 129], [1, 1, 1], [1, 3, 64], [1, 200, 1]):
        rows = sorted(zip(there, counts, strict=True), key=lambda row: row[1] != 1)
        blocks, now = [block for block, _ in rows], [count for _, count in rows]
        for block, count in rows:
            lens[block] += count
        ends = [lens[block] for block in blocks]
        if padding:
            blocks, now, ends = [*blocks, 8, 8], [*now, 0, 0], [*ends, 0, 0]
        longest = sum(now) + padding
        (x, decay, beta), got = run(pages, blocks, ends, now, padding=padding, longest=longest)
        at = 0
        for block, count in rows:
            for token in range(at, at + count):
                each = (x[token], decay[token], beta[token], CONV)
                want = there[block].token(*(one.double() for one in each))
                torch.testing.assert_close(got[token].double(), want, atol=2e-5, rtol=1e-4)
            at += count
    assert pages[[0, 1, 3, 4, 6]].isnan().all()
    for block, sequence in there.items():
        torch.testing.assert_close(
            pages[block, :, :30].view(4, 6, 5).double(), sequence.state, atol=2e-5, rtol=1e-4
        )


def test_strong_decay_and_equal_keys_stay_finite():
    """Sums of exponents over a block are large, and its keys may all be one."""
    pages = pages_of_nan()
    x, _, _ = inputs(150)
    spans = Spans.of(
        0, torch.tensor([0, 150], dtype=torch.int32), torch.tensor([150], dtype=torch.int32), 150
    )
    same, beta = x[:1].expand(150, -1), torch.ones(150, 4)
    decay = torch.full((150, 4), -30.0)
    for each in (decay, torch.zeros(150, 4)):
        got = gated_delta(same, each, beta, CONV, pages, torch.tensor([1]).int(), spans, SHAPE)
        sequence = Sequence()
        for token in range(150):
            inputs_of = (same[token], each[token], beta[token], CONV)
            want = sequence.token(*(one.double() for one in inputs_of))
            torch.testing.assert_close(got[token].double(), want, atol=1e-4, rtol=1e-3)


def test_tensors_that_do_not_fit_are_refused():
    x, decay, beta = inputs(2)
    spans = Spans.of(2, torch.zeros(1).int(), torch.ones(2).int(), 0)
    blocks = torch.tensor([0, 1], dtype=torch.int32)
    for change, name in (
        ((x[:, 1:], decay, beta, CONV, pages_of_nan(), blocks), "qkv"),
        ((x, decay[:, 1:], beta, CONV, pages_of_nan(), blocks), "decay"),
        ((x, decay, beta.double(), CONV, pages_of_nan(), blocks), "beta"),
        ((x, decay, beta, CONV[:, 1:], pages_of_nan(), blocks), "conv"),
        ((x, decay, beta, CONV, pages_of_nan()[:, :, :60], blocks), "numbers"),
        ((x, decay, beta, CONV, pages_of_nan(), blocks[:1]), "blocks"),
    ):
        with pytest.raises(BadTensor, match=name):
            gated_delta(*change, spans, SHAPE)
