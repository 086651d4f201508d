"""Jit code of pieces for Hopper, as triton_kernels.py keeps them: workspace slots, merge, rows out.

Sums come and go as [D, N] in a blocked layout whose threads hold 4 neighbours of D: columns are
query rows, of which `KEPT` can be real.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def leave_piece(
    pieces, stats, slot, acc, top, total,
    KEPT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Store the columns as rows of a workspace slot, with their maxima and sums."""
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    at = slot * KEPT + n
    gl.store(pieces + gl.expand_dims(at, 0) * D + d, acc, mask=gl.expand_dims(n < KEPT, 0))
    gl.store(stats + at * 2, top, mask=n < KEPT)
    gl.store(stats + at * 2 + 1, total, mask=n < KEPT)


@gluon.jit
def merge_pieces(
    pieces, stats, head_first, first, last, share,
    KEPT: gl.constexpr, N: gl.constexpr, D: gl.constexpr, WIDE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Sum the pieces of shares first..last: [D, N] in layout L, and the sums of its columns.

    WIDE pieces are loaded before the first is used: the merge costs one trip to L2 for each WIDE.
    """
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    # The first share of a pair keeps its piece in slot 1, unless the pair begins with the share.
    first_slot = first * 2 + (head_first > first * share).to(gl.int32)
    top = gl.full([N], -1e30, gl.float32, gl.SliceLayout(0, L))
    total = gl.zeros([N], gl.float32, gl.SliceLayout(0, L))
    acc = gl.zeros([D, N], gl.float32, L)
    for start in range(first, last + 1, WIDE):
        maxima = ()
        sums = ()
        parts = ()
        for i in gl.static_range(WIDE):
            which = start + i
            keep = (n < KEPT) & (which <= last)
            at = gl.where(which == first, first_slot, which * 2) * KEPT + n
            part = gl.load(
                pieces + gl.expand_dims(at, 0) * D + d,
                mask=gl.expand_dims(keep, 0),
                other=0.0,
                cache_modifier=".cg",
            )
            m = gl.load(stats + at * 2, mask=keep, other=-1e30, cache_modifier=".cg")
            s = gl.load(stats + at * 2 + 1, mask=keep, other=0.0, cache_modifier=".cg")
            maxima = maxima + (m,)  # type: ignore[assignment]  # noqa: RUF005
            sums = sums + (s,)  # type: ignore[assignment]  # noqa: RUF005
            parts = parts + (part,)  # type: ignore[assignment]  # noqa: RUF005
        new = top
        for i in gl.static_range(WIDE):
            new = gl.maximum(new, maxima[i])
        old = gl.exp2(top - new)
        total = total * old
        acc = acc * gl.expand_dims(old, 0)
        for i in gl.static_range(WIDE):
            weight = gl.exp2(maxima[i] - new)
            total += sums[i] * weight
            acc += parts[i] * gl.expand_dims(weight, 0)
        top = new
    return acc, total


@gluon.jit
def write(
    out, acc, total, q_first, q_len, head,
    GROUP: gl.constexpr, HEADS: gl.constexpr, N: gl.constexpr, D: gl.constexpr,
    L: gl.constexpr,
):  # fmt: skip
    """Normalise [D, N] and store its columns as rows; a row over no key is zero."""
    n = gl.arange(0, N, gl.SliceLayout(0, L))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(1, L)), 1)
    keep = n // GROUP < q_len
    row = (q_first + n // GROUP).to(gl.int64) * HEADS + head * GROUP + n % GROUP
    safe = gl.where(total > 0.0, total, 1.0)
    value = (acc / gl.expand_dims(safe, 0)).to(out.dtype.element_ty)
    gl.store(out + gl.expand_dims(row * D, 0) + d, value, mask=gl.expand_dims(keep, 0))
