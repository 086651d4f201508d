"""Jit code between the qkv projection and attention: norm, rotate, write, a program a few heads."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit
def _inverse_rms(low, high, dim, eps):
    return 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim + eps)


@triton.jit
def _gain(q_weight, k_weight, col, is_q, keep):
    """Return [heads, half] of norm weights: q's or k's by head."""
    q = tl.load(q_weight + col, mask=keep, other=0.0).to(tl.float32)
    k = tl.load(k_weight + col, mask=keep, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q[None, :], k[None, :])


@triton.jit
def _code(x, scale):
    """Return codes as ``narrow.codes.to_codes`` rounds them; the division is IEEE's."""
    scaled = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
    return tl.clamp(scaled, -448.0, 448.0, tl.PropagateNan.ALL).to(tl.float8e4nv)


# Offsets of a slot mapping in a buffer must not build another kernel.
@triton.jit(do_not_specialize=["blocks", "offsets"])
def rotate_heads(
    qkv, kv, cos, sin, blocks, offsets, kv_scales, q_weight, k_weight,
    cos_row, sin_row, kv_block, kv_two, kv_head, kv_token, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    AT_ONCE: tl.constexpr, NORM: tl.constexpr, CODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate AT_ONCE heads of one token. Grid: (tokens, cdiv(HEADS + 2 * KV_HEADS, AT_ONCE)).
    Without KV heads there is no slot mapping.

    qkv [tokens, HEADS + 2 * KV_HEADS, D] dense; q and k are rotated in place, k and v also go to
    their slot of kv [blocks, K|V, KV_HEADS, page, D] with strides kv_block to kv_token and a dense
    last dimension. cos and sin [tokens, D] with row strides; HALF >= D / 2, a power of two. All in
    float32; the norm is rounded to the type, like a separate norm. With CODES kv has the codes of k
    and v by kv_scales [2, KV_HEADS].
    """
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    col = tl.arange(0, HALF)
    half = D // 2
    in_half = col < half
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    low_gain = 1.0
    high_gain = 1.0
    if NORM:
        low_gain = _gain(q_weight, k_weight, col, is_q, in_half)
        high_gain = _gain(q_weight, k_weight, col + half, is_q, in_half)
    let_go(PDL)
    real = (head < ALL)[:, None] & in_half[None, :]
    at = qkv + (token * ALL + head)[:, None] * D + col[None, :]
    low_raw = tl.load(at, mask=real, other=0.0)
    high_raw = tl.load(at + half, mask=real, other=0.0)
    low = low_raw.to(tl.float32)
    high = high_raw.to(tl.float32)
    if NORM:
        scale = _inverse_rms(low, high, D, eps)[:, None]
        low = (low * scale * low_gain).to(qkv.dtype.element_ty).to(tl.float32)
        high = (high * scale * high_gain).to(qkv.dtype.element_ty).to(tl.float32)
    cos += token * cos_row + col
    sin += token * sin_row + col
    cos_low = tl.load(cos, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    new_low = (low * cos_low + high * sin_low).to(qkv.dtype.element_ty)
    new_high = (high * cos_high + low * sin_high).to(qkv.dtype.element_ty)
    new_low = tl.where(is_v[:, None], low_raw, new_low)
    new_high = tl.where(is_v[:, None], high_raw, new_high)
    rotated = real & (~is_v)[:, None]
    tl.store(at, new_low, mask=rotated)
    tl.store(at + half, new_high, mask=rotated)
    if KV_HEADS:
        cached = real & (~is_q)[:, None]
        which = head - HEADS
        page = kv + tl.load(blocks + token) * kv_block + tl.load(offsets + token) * kv_token
        at_head = which // KV_HEADS * kv_two + which % KV_HEADS * kv_head
        place = page + at_head[:, None] + col[None, :]
        if CODES:
            scale = tl.load(kv_scales + which, mask=~is_q & (head < ALL), other=1.0)[:, None]
            new_low = _code(new_low, scale)
            new_high = _code(new_high, scale)
        tl.store(place, new_low, mask=cached)
        tl.store(place + half, new_high, mask=cached)
