"""qk-norm, RoPE and KV write compiled by LLVM, for float32 in whole vectors.

Other calls go to the reference.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from llvmlite import ir
from torch import Tensor

from tandem.kernels.llvm.build import LANES, LONG, Kernel, fma, inverse_rms
from tandem.kernels.llvm.compiled import Address, agrees, bits_of, call, compiled

from . import QKNorm, Rotation, SlotMapping, reference

_FIELDS = (
    *("qkv", "token_stride", "heads", "kv_heads", "dim", "tokens", "blocks", "offsets"),
    *("cos", "sin", "cos_stride", "sin_stride"),
    *("kv", "block_stride", "kv_stride", "head_stride", "offset_stride"),
    *("q_weight", "k_weight", "eps", "part"),
)
_Fields = ctypes.c_int64 * len(_FIELDS)
_WORK = 8
"""Products that take as long as the rotation of a number."""


def rotary_kv(
    qkv: Tensor,
    kv: Tensor,
    rotation: Rotation,
    slot_mapping: SlotMapping,
    qk_norm: QKNorm | None,
    kv_scales: Tensor | None,
) -> Tensor:
    """See the wrapper."""
    vectors = [] if qk_norm is None else [qk_norm.q_weight, qk_norm.k_weight]
    floats = all(each.dtype == torch.float32 for each in (qkv, kv, *rotation, *vectors))
    dense = all(each.stride(0) == 1 for each in (*slot_mapping, *vectors))
    whole = qkv.shape[2] % (2 * LANES) == 0 and kv_scales is None
    if not (floats and dense and whole and _fits(qk_norm is not None)):
        return reference.rotary_kv(qkv, kv, rotation, slot_mapping, qk_norm, kv_scales)
    return _written(qkv, kv, rotation, slot_mapping, qk_norm)


def _written(
    qkv: Tensor, kv: Tensor, rotation: Rotation, slots: SlotMapping, norm: QKNorm | None
) -> Tensor:
    (tokens, all_heads, dim), kv_heads = qkv.shape, kv.shape[2]
    heads, (cos, sin) = all_heads - 2 * kv_heads, rotation
    fields = _Fields(
        *(qkv.data_ptr(), all_heads * dim, heads, kv_heads, dim, tokens),
        *(slots.blocks.data_ptr(), slots.offsets.data_ptr(), cos.data_ptr(), sin.data_ptr()),
        *(cos.stride(0), sin.stride(0), kv.data_ptr(), *kv.stride()[:4]),
    )
    if norm is not None:
        weights = norm.q_weight.data_ptr(), norm.k_weight.data_ptr()
        fields[-4:] = [*weights, bits_of(norm.eps), bits_of(1 / dim)]
    call(_kernel(norm is not None), fields, _WORK * tokens * all_heads * dim)
    return qkv[:, :heads]


@cache
def _fits(normed: bool) -> bool:
    def pair() -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(0)
        qkv = torch.randn(3, 7, 64, generator=draw)
        rotation = Rotation(*torch.randn(2, 3, 64, generator=draw))
        slots = SlotMapping(torch.tensor([1, 0, 1]), torch.tensor([3, 0, 1]))
        q_weight, k_weight = torch.randn(2, 64, generator=draw)
        norm = QKNorm(q_weight, k_weight, 1e-5) if normed else None
        got, want = (torch.zeros(2, 2, 2, 4, 64) for _ in range(2))
        q = _written(qkv.clone(), got, rotation, slots, norm)
        of_torch = reference.rotary_kv(qkv, want, rotation, slots, norm, None)
        return torch.cat((q.flatten(), got.flatten())), torch.cat(
            (of_torch.flatten(), want.flatten())
        )

    return agrees("rotary_kv", pair)


@cache
def _kernel(normed: bool) -> Address:
    module = ir.Module("rotary_kv")
    k = Kernel(module, "rotary_kv", _FIELDS)
    b, field, dim, heads = k.b, k.fields, k.fields["dim"], k.fields["heads"]
    half, rotated = b.udiv(dim, LONG(2)), b.add(heads, field["kv_heads"])
    first, end = k.share(field["tokens"])
    with k.loop(end, first=first) as token:
        x = k.at(k.pointer("qkv"), b.mul(token, field["token_stride"]))
        cos, sin = (
            k.at(k.pointer(name), b.mul(token, field[f"{name}_stride"])) for name in ("cos", "sin")
        )
        block, offset = (
            b.load(k.at(k.pointer(name), token, kind=LONG), typ=LONG)
            for name in ("blocks", "offsets")
        )
        slot = k.at(
            k.pointer("kv"),
            *(b.mul(block, field["block_stride"]), b.mul(offset, field["offset_stride"])),
        )
        with k.loop(rotated) as head:
            own = k.at(x, b.mul(head, dim))
            factor = inverse_rms(k, own, dim) if normed else None
            is_q = b.icmp_signed("<", head, heads)
            gain = b.select(is_q, k.pointer("q_weight"), k.pointer("k_weight"))
            with k.loop(half, step=LANES) as at:
                places = at, b.add(at, half)
                low, high = (k.floats(own, each) for each in places)
                if factor is not None:
                    low, high = (
                        b.fmul(b.fmul(value, factor), k.floats(gain, each))
                        for value, each in zip((low, high), places, strict=True)
                    )
                for place, value, other in zip(places, (low, high), (high, low), strict=True):
                    plain = b.fmul(value, k.floats(cos, place))
                    k.put(fma(b, other, k.floats(sin, place), plain), own, place)
        with k.loop(field["kv_heads"]) as head:
            key = k.at(x, b.mul(b.add(heads, head), dim))
            value = k.at(x, b.mul(b.add(rotated, head), dim))
            to = k.at(slot, b.mul(head, field["head_stride"]))
            with k.loop(dim, step=LANES) as at:
                k.put(k.floats(key, at), to, at)
                k.put(k.floats(value, at), to, field["kv_stride"], at)
    b.ret_void()
    return compiled(module)["rotary_kv"]
