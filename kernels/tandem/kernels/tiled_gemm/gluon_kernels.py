"""Jit code of products of few rows with codes of 4 bits for Hopper.

A producer warp copies tiles of codes and rows of x by TMA into a ring, codes before the kernel
ahead has ended. A warpgroup decodes a tile in registers, as left operand of its matrix unit. A
thread's 16 bytes of a tile are those of its own operands, which needs no exchange.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tandem.kernels.gemm.stream_kernels import first_inner, next_step, share_of, store_sums
from tandem.kernels.launch.gluon_kernels import load_box, release, wait

TILE = gl.constexpr(64)
"""Outputs of a tile."""
BLOCK = gl.constexpr(128)
"""Inputs of a tile."""
WORDS = gl.constexpr(32)
"""Words of 16 bits of a tile's row."""


@gluon.jit
def _decoded(words, NUMBER: gl.constexpr, zero, scale):
    """Return (code - zero) * scale of one nibble of each word in the scale's type: [TILE, WORDS].

    0x4300 | code is 128 + code in bfloat16, and 0x6400 | code is 1024 + code in float16; zero has
    the same addend.
    """
    HALF: gl.constexpr = scale.dtype == gl.float16
    KIND: gl.constexpr = "f16x2" if HALF else "bf16x2"
    BITS: gl.constexpr = "0x64006400" if HALF else "0x43004300"
    return gl.inline_asm_elementwise(
        f"""{{ .reg .b32 t;
        shr.b32 t, $1, {NUMBER * 4};
        lop3.b32 t, t, 0x000F000F, {BITS}, 0xEA;
        sub.rn.{KIND} t, t, $2;
        mul.rn.{KIND} $0, t, $3; }}""",
        "=r,r,r,r",
        [words, zero, scale],
        dtype=scale.dtype,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _nibble(words, zeros, scales, NUMBER: gl.constexpr, GROUPS: gl.constexpr):
    """Return the values of one nibble, which are of one group."""
    return _decoded(words, NUMBER, zeros[NUMBER * GROUPS // 4], scales[NUMBER * GROUPS // 4])


@gluon.jit
def _operand(words, zeros, scales, GROUPS: gl.constexpr, ML: gl.constexpr):
    """Return a tile of the weight as left operand: [TILE, BLOCK]; zeros and scales are tuples of
    [TILE, 1] for each of GROUPS groups."""
    even = gl.join(
        _nibble(words, zeros, scales, 0, GROUPS), _nibble(words, zeros, scales, 2, GROUPS)
    )
    odd = gl.join(
        _nibble(words, zeros, scales, 1, GROUPS), _nibble(words, zeros, scales, 3, GROUPS)
    )
    pairs = gl.join(even, odd)
    # [n, word, 2, 2]: the last two are the number of the nibble, high bit first.
    w = gl.reshape(gl.permute(pairs, (0, 2, 3, 1)), [TILE, 4, 4, 2, 2, 2])
    # [n, nibble, thread, step, half, pair] to the order of inputs.
    w = gl.reshape(gl.permute(w, (0, 1, 3, 4, 2, 5)), [TILE, BLOCK])
    return gl.convert_layout(w, gl.DotOperandLayout(0, ML, 2), assert_trivial=True)


@gluon.jit
def _scales_of(scales, row, step, length, COUNT: gl.constexpr, L: gl.constexpr):
    """Return the words of scale and zero of the COUNT groups of a step's blocks: [TILE] each."""
    n = gl.arange(0, TILE, gl.SliceLayout(1, L))
    found = ()
    for g in gl.static_range(COUNT):
        word = gl.load(scales + (row + step * COUNT + g) * TILE + n, mask=step < length, other=0)
        found = found + (word,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _half_of(word, SHIFT: gl.constexpr, TYPE: gl.constexpr):
    """Return scale or zero [TILE, 1] of words [TILE]."""
    half = ((word >> SHIFT) & 0xFFFF).to(gl.uint16)
    return gl.expand_dims(half.to(TYPE, bitcast=True), 1)


@gluon.jit
def multiply_steps(
    cs, xs, full, empty, begin, length, scales, row,
    BM: gl.constexpr, NB: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    ML: gl.constexpr,
):  # fmt: skip
    """Return sums of a tile of outputs over `length` steps of NB blocks from `begin` on: float32
    [TILE, BM]. Its scales begin in `row`."""
    # A thread has 8 words of rows r and r + 8.
    L: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[TILE, WORDS],
    )
    # Scales are read a step ahead of their use, which hides the latency of memory.
    now = _scales_of(scales, row, 0, length, NB * GROUPS, L)
    then = _scales_of(scales, row, 1, length, NB * GROUPS, L)
    acc = gl.zeros([TILE, BM], gl.float32, ML)
    for step in range(length):
        i = (begin + step) % STAGES
        mbarrier.wait(full.index(i), ((begin + step) // STAGES) & 1)
        for b in gl.static_range(NB):
            words = cs.index(i).slice(b * TILE, TILE, dim=0).load(L)
            zeros = ()
            factors = ()
            for g in gl.static_range(GROUPS):
                word = now[b * GROUPS + g]
                zero = _half_of(word, 16, xs.dtype)
                factor = _half_of(word, 0, xs.dtype)
                zeros = zeros + (zero,)  # type: ignore[assignment]  # noqa: RUF005
                factors = factors + (factor,)  # type: ignore[assignment]  # noqa: RUF005
            w = _operand(words, zeros, factors, GROUPS, ML)
            x = xs.index(i).slice(b * BLOCK, BLOCK, dim=1).permute((1, 0))
            if b > 0:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            acc = warpgroup_mma(w, x, acc, is_async=True)
        now = then
        then = _scales_of(scales, row, step + 2, length, NB * GROUPS, L)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(i), count=1)
    return acc


@gluon.jit
def _consumer(
    cs, xs, full, empty, length, pieces, scales, bias, residual, out, partials, counters,
    rows, outputs, residual_row,
    BM: gl.constexpr, NB: gl.constexpr, GROUPS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    ML: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16]
    )
    first, mine = share_of(pieces)
    for at in range(mine):
        piece = first + at
        row = piece * length * NB * GROUPS
        acc = multiply_steps(
            cs, xs, full, empty, at * length, length, scales, row, BM, NB, GROUPS, STAGES, ML
        )
        if at == 0:
            wait(PDL)
        store_sums(
            (acc,), piece, bias, residual, out, partials, counters, rows, outputs, residual_row,
            BM, TILE, 1, SPLIT, False, ADD, BIAS,
        )  # fmt: skip


@gluon.jit
def _producer(
    c_desc, x_desc, cs, xs, full, empty, length, pieces,
    BM: gl.constexpr, NB: gl.constexpr, SPLIT: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    BYTES: gl.constexpr = NB * (TILE * WORDS + BM * BLOCK) * 2
    first, mine = share_of(pieces)
    count = mine * length
    ring = gl.minimum(count, STAGES)
    # Steps of a program are contiguous in the codes.
    start = first * length * NB * TILE
    for s in range(ring):
        mbarrier.expect(full.index(s), BYTES)
        load_box(c_desc, [start + s * NB * TILE, 0], full.index(s), cs.index(s))
    wait(PDL)
    release(PDL)
    piece, at = first, 0
    for s in range(ring):
        k = first_inner(piece, at, length, NB * BLOCK, SPLIT)
        load_box(x_desc, [0, k], full.index(s), xs.index(s))
        piece, at = next_step(piece, at, length)
    for s in range(ring, count):
        k = first_inner(piece, at, length, NB * BLOCK, SPLIT)
        i = s % STAGES
        mbarrier.wait(empty.index(i), ((s // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(i), BYTES)
        load_box(c_desc, [start + s * NB * TILE, 0], full.index(i), cs.index(i))
        load_box(x_desc, [0, k], full.index(i), xs.index(i))
        piece, at = next_step(piece, at, length)


@gluon.jit(do_not_specialize=["rows", "length", "pieces"])
def multiply_tiles(
    c_desc, x_desc, scales, bias, residual, out, partials, counters,
    rows, outputs, residual_row, length, pieces,
    BM: gl.constexpr, NB: gl.constexpr, GROUPS: gl.constexpr, SPLIT: gl.constexpr,
    STAGES: gl.constexpr, ADD: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply up to BM rows with a weight. Grid: at most `pieces` programs, 4 warps.

    c_desc: words of 16 bits [tiles of outputs * blocks of inputs * TILE, WORDS], boxes [NB * TILE,
    WORDS]. x_desc: [rows, inner] in 16 bits, boxes [BM, NB * BLOCK]. scales: int32 [tiles of
    outputs * blocks * GROUPS, TILE], in x's type the scale in the low half, and the zero point in
    the high (tiles.py). `length` is inner / BLOCK / NB / SPLIT, `pieces` the tiles of outputs times
    SPLIT. Others as ``multiply_stream``'s.
    """
    cs = gl.allocate_shared_memory(c_desc.dtype, [STAGES, NB * TILE, WORDS], c_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, NB * BLOCK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                cs, xs, full, empty, length, pieces, scales, bias, residual, out, partials,
                counters, rows, outputs, residual_row,
                BM, NB, GROUPS, SPLIT, STAGES, ADD, BIAS, PDL,
            )),
            (_producer, (
                c_desc, x_desc, cs, xs, full, empty, length, pieces, BM, NB, SPLIT, STAGES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
