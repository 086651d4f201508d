"""Drafts in Triton against their reference, on tokens of two letters, whose n-grams return."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.gpu.where import DEVICE, NEEDS

from tandem.kernels.drafts import StepTokens, TokenHistory, accept, lookup, place
from tandem.kernels.registry import Backend

pytestmark = NEEDS
ROWS, COLUMNS, DRAFTS = 6, 4096, 5


def histories(lengths: list[int]) -> list[TokenHistory]:
    """Return equal histories, on the CPU and on the device; the last row takes padding."""
    torch.manual_seed(3)
    tokens = torch.randint(0, 2, (ROWS + 1, COLUMNS), dtype=torch.int32)
    drafts = torch.randint(0, 2, (ROWS + 1, DRAFTS))
    drafts[1, 2:] = drafts[3] = -1
    made = tokens, torch.tensor([*lengths, 0]), drafts
    return [
        TokenHistory(*(each.to(where, copy=True) for each in made)) for where in ("cpu", DEVICE)
    ]


def assert_equal(found, expected):
    for one, two in zip(found, expected, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one.cpu(), two.cpu(), rtol=0, atol=0)


@pytest.mark.parametrize(("least", "most"), [(1, 1), (2, 3), (1, 5)])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 6, 9, 12], [40, 1024, 1025, 1026, 2049, 3000]])
def test_a_lookup_finds_the_same_place(lengths, least, most):
    rows = torch.tensor([5, 0, 2, 1, 4, 3])
    results = []
    for history, backend in zip(histories(lengths), (Backend.TORCH, Backend.TRITON), strict=True):
        history.token_ids[0] = 7  # one token again and again
        history.token_ids[2, :] = torch.arange(COLUMNS, dtype=torch.int32)  # nothing returns
        there = rows.to(history.lengths.device)
        counts = torch.zeros_like(there)
        lookup(history, there, least, most, counts, backend=backend)
        results.append((*history, counts))
    assert_equal(*results)
    assert results[0][-1][2] == 0


def test_the_same_samples_are_accepted():
    """Rows with several drafts, fewer, none, of one sample, and one that is skipped."""
    spans = torch.tensor([[0, 4, 8, 9, 3], [4, 4, 1, 6, 1]])
    results = []
    for history, backend in zip(
        histories([9, 20, 30, 40, 50, 60]), (Backend.TORCH, Backend.TRITON), strict=True
    ):
        device = history.lengths.device
        sampled = torch.randint(0, 2, (15,), generator=torch.Generator().manual_seed(5))
        sampled[:3] = history.drafts[0, :3].cpu()
        last = torch.arange(ROWS + 1, device=device)
        rows = torch.tensor([0, 1, 2, 3, ROWS], device=device)
        found = accept(history, rows, spans.to(device), sampled.to(device), last, backend=backend)
        results.append((*history, last, found))
    assert_equal(*results)
    accepted, compared, _ = results[0][-1].tolist()
    assert (accepted[0], accepted[3], accepted[4]) == (3, 0, 0)
    assert compared == [3, 2, 0, 0, 0]


@pytest.mark.parametrize("decodes", [0, 2, 5])
def test_the_same_inputs_are_completed(decodes):
    """Rows that the history knows beside others, in two groups; padding is left alone."""
    counts = [1] * decodes + [4, 1, 6][: 5 - decodes]
    tokens, rows, size = sum(counts) + 2, len(counts), 8
    results = []
    for history, backend in zip(
        histories([9, 20, 30, 40, 50, 60]), (Backend.TORCH, Backend.TRITON), strict=True
    ):
        device = history.lengths.device
        starts = torch.tensor([0, *counts[decodes:]]).cumsum(0).int()
        lens = torch.tensor([-1, 17, -1, -1, 0][:rows])
        tables = torch.arange(2 * (rows + 3) * 20).view(2, rows + 3, 20).int()
        step = StepTokens(
            rows=torch.tensor([4, 1, 0, 3, ROWS][:rows], device=device),
            lens=lens.to(device),
            chunk_starts=starts.to(device),
            token_ids=torch.full((tokens,), 99, device=device),
            positions=torch.full((tokens,), 77, device=device),
            blocks=torch.full((2, tokens), 66, device=device),
            offsets=torch.full((tokens,), 55, device=device),
            seq_lens=torch.full((rows,), 70, device=device, dtype=torch.int32),
            block_tables=tables.to(device)[:, :rows],
            draws=torch.full((3, 5 if decodes == 5 else 0), 30, device=device),
            block_size=size,
        )
        earlier = place(history, step, backend=backend)
        results.append((*history, *step[:-1], earlier))
    assert_equal(*results)
    assert results[0][1][1] == 17
    assert (results[0][-1] > 0).any()
