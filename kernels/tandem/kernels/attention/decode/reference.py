"""Decode attention in plain torch: gather the pages of many sequences at once, one SDPA call.

The query heads of a KV head are its query rows, so no key is repeated. Sequences are padded within
groups of similar length. Padded keys are zeroed: a reused block may hold NaN, which survives a
mask.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.batch import PagedBatch
from tandem.kernels.attention.pages import PageShape, gather, page_rows


class _Group(NamedTuple):
    members: Tensor | None
    """Rows of the batch, int64; None is the whole batch in order."""
    size: int
    keys: int
    """Keys of the longest member."""
    rows: Tensor
    padding: Tensor | None
    """Rows of the gathered [.., token, head_dim] that hold no key of their sequence."""
    mask: Tensor | None
    """Added to the scores, [members, 1, 1, keys]."""


def decode(q: Tensor, kv: Tensor, batch: PagedBatch, scale: float) -> Tensor:
    """See the wrapper."""
    shape = PageShape.of(kv)
    groups = _plan(batch, shape, q.dtype)
    if len(groups) == 1 and groups[0].members is None:
        return _attend(q, kv, shape, groups[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        out[group.members] = _attend(q[group.members], kv, shape, group, scale)
    return out


def _attend(q: Tensor, kv: Tensor, shape: PageShape, group: _Group, scale: float) -> Tensor:
    pages = gather(kv, shape, group.rows, group.size)
    if group.padding is not None:
        pages.view(-1, shape.head_dim).index_fill_(0, group.padding, 0)
    pages = pages[:, :, :, : group.keys]
    folded = q.reshape(group.size, shape.num_kv_heads, -1, shape.head_dim)
    attended = scaled_dot_product_attention(
        folded, pages[0], pages[1], attn_mask=group.mask, scale=scale
    )
    return attended.reshape(q.shape)


def _plan(batch: PagedBatch, shape: PageShape, dtype: torch.dtype) -> list[_Group]:
    key = ("decode.torch", shape, dtype)
    if key not in batch.memo:
        lens = batch.seq_lens.tolist()
        batch.memo[key] = [_group(batch, m, lens, shape, dtype) for m in _similar(lens)]
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
    batch: PagedBatch, members: list[int], lens: list[int], shape: PageShape, dtype: torch.dtype
) -> _Group:
    device = batch.block_tables.device
    keys = max(lens[m] for m in members)
    blocks = -(-keys // shape.block_size)
    whole = len(members) == batch.num_sequences
    index = None if whole else torch.tensor(members, device=device)
    tables = batch.block_tables if index is None else batch.block_tables[index]
    seq_lens = batch.seq_lens if index is None else batch.seq_lens[index]
    held = torch.arange(blocks * shape.block_size, device=device) < seq_lens.unsqueeze(1)
    used = held[:, :: shape.block_size]
    rows = page_rows(shape, tables[:, :blocks].masked_fill(~used, 0))
    if bool(held[:, :keys].all()):
        return _Group(index, len(members), keys, rows, None, None)
    everywhere = (~held).view(1, len(members), 1, -1).expand(2, -1, shape.num_kv_heads, -1)
    padding = everywhere.reshape(-1).nonzero().view(-1)
    mask = torch.zeros(len(members), 1, 1, keys, dtype=dtype, device=device)
    mask.masked_fill_(~held[:, :keys].view(len(members), 1, 1, keys), float("-inf"))
    return _Group(index, len(members), keys, rows, padding, mask)
