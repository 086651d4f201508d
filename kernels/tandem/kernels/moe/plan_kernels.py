"""Jit code of the list of chosen experts of few tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.launch.triton_kernels import let_go


@triton.jit(do_not_specialize=["tokens"])
def list_chosen(
    ids, chosen, slots, tokens, num_chosen,
    EXPERTS: tl.constexpr, ROUTES: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the number of chosen experts and their ids, ascending, to chosen, and to slots [chosen,
    BM] the place of each token's route to the expert, -1 without one. Grid: (EXPERTS / 16,).

    ids int32 [tokens, num_chosen]; EXPERTS and ROUTES are powers of two.
    """
    let_go(PDL)
    route = tl.arange(0, ROUTES)
    expert = tl.arange(0, EXPERTS)
    real = route < tokens * num_chosen
    of_route = tl.load(ids + route, mask=real, other=-1)
    has = tl.max((of_route[None, :] == expert[:, None]).to(tl.int32), 1)
    place = tl.cumsum(has, 0) - has
    if tl.program_id(0) == 0:
        tl.store(chosen, tl.sum(has, 0))
        tl.store(chosen + 1 + place, expert, mask=has > 0)
    m = tl.arange(0, BM)
    for i in range(16):
        mine = tl.program_id(0) * 16 + i
        is_mine = expert == mine
        if tl.sum(tl.where(is_mine, has, 0), 0) > 0:
            row = tl.sum(tl.where(is_mine, place, 0), 0)
            found = (of_route == mine) & real
            at = tl.where((route // num_chosen)[None, :] == m[:, None], found[None, :], False)
            slot = tl.max(tl.where(at, (route % num_chosen)[None, :], -1), 1)
            tl.store(slots + row * BM + m, slot)
