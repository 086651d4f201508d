"""The gated delta rule in plain torch: decodes token by token, chunks by blocks of tokens.

No size depends on numbers on the device, so nothing waits for it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from . import DeltaShape, Spans
from .packing import put_tokens, unpacked

BLOCK = 64
"""Tokens of a chunk that one triangular system solves."""
_EPS = 1e-6


def gated_delta(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    conv: Tensor,
    pages: Tensor,
    blocks: Tensor,
    spans: Spans,
    shape: DeltaShape,
) -> Tensor:
    """See the wrapper."""
    rows = blocks.to(torch.int64)
    held = pages.index_select(0, rows).masked_fill_(spans.fresh[:, None, None], 0)
    states, before = unpacked(held, shape)
    mixed, after = _convolved(qkv, conv, before, spans)
    q, k, v = _heads(silu(mixed), shape)
    n = spans.num_decodes
    out = v.new_zeros(len(v) + 1, *v.shape[1:])
    if n:
        out[:n], states[:n] = _decoded(q[:n], k[:n], v[:n], decay[:n], beta[:n], states[:n])
    if len(rows) > n:
        _add_chunks(q, k, v, decay, beta, states, out, spans)
    put_tokens(held, after, shape)
    pages.index_copy_(0, rows, held)
    return out[:-1].to(qkv.dtype)


def _convolved(x: Tensor, weight: Tensor, before: Tensor, spans: Spans) -> tuple[Tensor, Tensor]:
    """Return the causal convolution of x [tokens, channels] and each row's last tokens [rows,
    channels, history].

    Each row's history is put before its tokens in one long sequence.
    """
    (tokens, channels), history = x.shape, before.shape[2]
    row = torch.arange(len(before), device=x.device)
    own = torch.arange(tokens, device=x.device) + (spans.owners(tokens) + 1) * history
    taps = torch.arange(history, device=x.device)
    old = (spans.starts + row * history)[:, None] + taps
    whole = before.new_zeros(tokens + len(before) * history, channels)
    whole[own] = x.to(whole.dtype)
    whole[old] = before.transpose(1, 2)
    mixed = whole.index_select(0, own) * weight[:, history]
    for tap in range(history):
        mixed.addcmul_(whole.index_select(0, own - history + tap), weight[:, tap])
    return mixed, whole[old + spans.lengths[:, None]].transpose(1, 2)


def _heads(mixed: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k, normed, and v, each [tokens, value heads, ..]."""
    keys = shape.num_key_heads * shape.key_dim
    q, k, v = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
    each = shape.num_value_heads // shape.num_key_heads
    q, k = (_normed(part.reshape(len(part), -1, shape.key_dim)) for part in (q, k))
    q = q * shape.key_dim**-0.5
    q, k = (part.repeat_interleave(each, 1) for part in (q, k))
    return q, k, v.reshape(len(v), -1, shape.value_dim)


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _EPS)


def _decoded(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs [rows, heads, value_dim] of one token a row, and the new states."""
    states = states * decay.exp()[..., None, None]
    known = (k.unsqueeze(-2) @ states).squeeze(-2)
    added = (v - known) * beta.unsqueeze(-1)
    states = states + k.unsqueeze(-1) * added.unsqueeze(-2)
    return (q.unsqueeze(-2) @ states).squeeze(-2), states


def _add_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    out: Tensor,
    spans: Spans,
) -> None:
    """Write the outputs of all chunks and their states; the last row of ``out`` is for padding.

    Block ``at`` of all chunks that may be longer is computed at once. At most tokens / (at + 1)
    chunks have more than ``at`` tokens.
    """
    total, chunks = len(v) - spans.num_decodes, len(spans.longest_first)
    for at in range(0, min(spans.max_query_len, total), BLOCK):
        rows = spans.longest_first[: min(chunks, total // (at + 1))]
        place = torch.arange(at, min(at + BLOCK, spans.max_query_len), device=v.device)
        real = place < spans.lengths[rows, None]
        tokens = torch.where(real, spans.starts[rows, None] + place, len(v))
        found, states[rows] = _solved(
            _gathered(q, tokens, real),
            _gathered(k, tokens, real),
            _gathered(v, tokens, real),
            _gathered(decay, tokens, real),
            _gathered(beta, tokens, real),
            states[rows],
        )
        out[tokens] = found.transpose(1, 2)


def _gathered(x: Tensor, tokens: Tensor, real: Tensor) -> Tensor:
    """Return x [tokens, heads, ..] as [rows, heads, block, ..], zero in padding."""
    found = x[tokens.clamp(max=len(x) - 1)]
    keep = real.view(*real.shape, *(1,) * (found.dim() - 2))
    return found.masked_fill(~keep, 0).transpose(1, 2)


def _solved(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the outputs of one block [rows, heads, block, value_dim] and the new states.

    The updates of a block are the solution of a lower triangular system (Yang et al., 2025, section
    3.3). Padding has k, decay and beta of 0, which leaves the state as it is.
    """
    passed = decay.cumsum(-1)
    between = (passed.unsqueeze(-1) - passed.unsqueeze(-2)).tril().exp().tril()
    grown = passed.exp().unsqueeze(-1)
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * between
    right = torch.cat((v * beta.unsqueeze(-1), k_beta * grown), -1)
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solution.split((v.shape[-1], k.shape[-1]), -1)
    added = values - keys @ states
    out = (q * grown) @ states + ((q @ k.transpose(-1, -2)) * between) @ added
    left = (passed[..., -1:] - passed).exp().unsqueeze(-1)
    states = states * grown[..., -1:, :] + (k * left).transpose(-1, -2) @ added
    return out, states
