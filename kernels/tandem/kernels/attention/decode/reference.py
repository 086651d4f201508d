"""Decode attention in plain torch: gather the pages of many sequences at once, one SDPA call.

The query heads of a KV head are its query rows, so no key is repeated. Sequences are padded within
groups of similar length. Padded keys are zeroed: a reused block may hold NaN, which survives a
mask. With a window, only the pages from its first key on are gathered.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.batch import PagedBatch, Scores
from tandem.kernels.attention.pages import PageShape, gather, in_float32, page_rows
from tandem.kernels.attention.softmax import attend
from tandem.kernels.narrow.codes import from_codes


class _Group(NamedTuple):
    members: Tensor | None
    """Rows of the batch, int64; None is the whole batch in order."""
    size: int
    keys: int
    """Gathered keys of the longest member."""
    rows: Tensor
    padding: Tensor | None
    """Rows of the gathered [.., token, head_dim] that hold no visible key of their sequence."""
    mask: Tensor | None
    """Added to the scores, [members, 1, 1, keys]."""
    distance: Tensor
    """Position of each gathered key minus that of the query, [members, 1, 1, keys]."""


def decode(
    q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores, kv_scales: Tensor | None
) -> Tensor:
    """See the wrapper."""
    if kv_scales is not None:
        return in_float32(lambda q, kv: _decode(q, kv, batch, scores), q, kv, kv_scales)
    return _decode(q, kv, batch, scores)


def _decode(q: Tensor, kv: Tensor, batch: PagedBatch, scores: Scores) -> Tensor:
    shape = PageShape.of(kv)
    groups = _plan(batch, shape, q.dtype, scores.window)
    if len(groups) == 1 and groups[0].members is None:
        return _attend(q, kv, shape, groups[0], scores)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        out[group.members] = _attend(q[group.members], kv, shape, group, scores)
    return out


def _attend(q: Tensor, kv: Tensor, shape: PageShape, group: _Group, scores: Scores) -> Tensor:
    pages = gather(kv, shape, group.rows, group.size)
    if group.padding is not None:
        pages.view(-1, shape.head_dim).index_fill_(0, group.padding, 0)
    pages = pages[:, :, :, : group.keys]
    if pages.dtype == torch.uint8:
        pages = from_codes(pages, q.dtype)
    if not scores.plain:
        attended = attend(q.unsqueeze(2), pages[0], pages[1], group.mask, group.distance, scores)
        return attended.view(q.shape)
    folded = q.reshape(group.size, shape.num_kv_heads, -1, shape.head_dim)
    attended = scaled_dot_product_attention(
        folded, pages[0], pages[1], attn_mask=group.mask, scale=scores.scale
    )
    return attended.reshape(q.shape)


def _plan(
    batch: PagedBatch, shape: PageShape, dtype: torch.dtype, window: int | None
) -> list[_Group]:
    key = ("decode.torch", shape, dtype, window)
    if key not in batch.memo:
        lens = batch.seq_lens.tolist()
        lows = [0 if window is None else max(n - window, 0) for n in lens]
        starts = [low // shape.block_size * shape.block_size for low in lows]
        visible = [n - start for n, start in zip(lens, starts, strict=True)]
        batch.memo[key] = [
            _group(batch, m, max(visible[i] for i in m), window, shape, dtype)
            for m in _similar(visible)
        ]
    return cast("list[_Group]", batch.memo[key])


def _similar(lens: list[int]) -> list[list[int]]:
    """Return indices of `lens` in groups: the longest is at most twice the shortest, or 128."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lens)), key=lens.__getitem__):
        if groups and lens[i] <= 2 * max(lens[groups[-1][0]], 64):
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group) for group in groups]


def _group(
    batch: PagedBatch,
    members: list[int],
    keys: int,
    window: int | None,
    shape: PageShape,
    dtype: torch.dtype,
) -> _Group:
    device = batch.block_tables.device
    size = len(members)
    blocks = -(-keys // shape.block_size)
    whole = size == batch.num_sequences
    index = None if whole else torch.tensor(members, device=device)
    tables = batch.block_tables if index is None else batch.block_tables[index]
    seq_lens = (batch.seq_lens if index is None else batch.seq_lens[index]).unsqueeze(1)
    low = torch.zeros_like(seq_lens) if window is None else (seq_lens - window).clamp(min=0)
    first = low // shape.block_size
    key = first * shape.block_size + torch.arange(blocks * shape.block_size, device=device)
    held = (low <= key) & (key < seq_lens)
    used = held.view(size, blocks, shape.block_size).any(-1)
    columns = (first + torch.arange(blocks, device=device)).masked_fill(~used, 0)
    rows = page_rows(shape, tables.gather(1, columns.long()).masked_fill(~used, 0))
    distance = (key - seq_lens + 1)[:, :keys].view(size, 1, 1, keys)
    if bool(held[:, :keys].all()):
        return _Group(index, size, keys, rows, None, None, distance)
    everywhere = (~held).view(1, size, 1, -1).expand(2, -1, shape.num_kv_heads, -1)
    padding = everywhere.reshape(-1).nonzero().view(-1)
    mask = torch.zeros(size, 1, 1, keys, dtype=dtype, device=device)
    mask.masked_fill_(~held[:, :keys].view(size, 1, 1, keys), float("-inf"))
    return _Group(index, size, keys, rows, padding, mask, distance)
