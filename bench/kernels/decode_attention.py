"""Paged decode attention against the memory's read rate: python bench/kernels/decode_attention.py.

Every launch reads another layer of the slab (cold pages) and the figure includes the plan, made
once for all layers as in a decode step. Both kernels are measured where both run, Gluon's first;
--sweep tries its tunings too, and prints each case's best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from tandem.kernels.attention.decode import gluon, triton
from tandem.kernels.measure.timing import L2_BYTES, Case, Shape, error, make_case, replay_us

Tuning = gluon.Tuning | triton.Tuning
SHAPE = Shape()
SCALE = SHAPE.head_dim**-0.5


def tenfold(batch: int, mean: int) -> list[int]:
    """Lengths spread log-uniformly over a factor of ten, of the given mean."""
    rng = random.Random(batch * mean)
    raw = [10 ** (i / max(1, batch - 1)) for i in range(batch)]
    rng.shuffle(raw)
    return [max(1, round(r * mean * batch / sum(raw))) for r in raw]


def cases(wanted: str) -> dict[str, tuple[list[int], int]]:
    """Name to lengths and queries a sequence."""
    even = [(1, 512), (1, 2048), (1, 16384), (8, 2048), (32, 1024), (32, 2048), (32, 8192)]
    even += [(64, 1024), (64, 1160), (128, 1024), (128, 2048), (256, 1024)]
    out = {f"{b} x {n}": ([n] * b, 1) for b, n in even}
    out |= {f"{b} x ~{n}": (tenfold(b, n), 1) for b, n in ((8, 2048), (32, 2048), (32, 8192))}
    out |= {f"{b} x {n}, 4 queries": ([n] * b, 4) for b, n in ((1, 2048), (8, 2048), (32, 2048))}
    return {k: v for k, v in out.items() if wanted in k}


def layers_for(lengths: list[int], blocks: int) -> int:
    """Enough layers that none is in L2 when its turn comes, within 40 GB."""
    one = blocks * SHAPE.page * SHAPE.key_bytes
    return max(2, min(36, (40 << 30) // one, max(36, 4 * L2_BYTES // one)))


def run_all(case: Case, out: torch.Tensor, tuning: Tuning) -> None:
    """A step: the plan, then every layer."""
    batch = replace(case.batch, memo={})
    for layer in range(case.kv_cache.shape[1]):
        q, kv = case.q[layer], case.layer(layer)
        if isinstance(tuning, gluon.Tuning):
            gluon.launch(q, kv, batch, SCALE, out, None, tuning)
        else:
            triton.launch(q, kv, batch, SCALE, out, None, tuning)


def measure(case: Case, tuning: Tuning) -> tuple[float, float]:
    """µs a layer and relative error; NaN in `out` before, so that an unwritten row shows."""
    out = torch.full_like(case.q[0], torch.nan)
    run_all(case, out, tuning)
    gap = error(case, case.kv_cache.shape[1] - 1, out, SCALE)
    return replay_us(lambda: run_all(case, out, tuning), case.kv_cache.shape[1]), gap


def _us(found: tuple[float, float, Tuning]) -> float:
    return found[0]


def read_rate() -> float:
    """TB/s of a reduction over 8 GB: what this machine's memory gives to reads, or nearly."""
    x = torch.ones(4 << 30, dtype=torch.bfloat16, device="cuda").view(torch.float32)
    us = replay_us(lambda: x.sum(), 1)
    return x.numel() * 4 / us / 1e6


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    hopper = torch.cuda.get_device_capability()[0] == 9
    tunings: list[Tuning] = [gluon.DEFAULT, triton.DEFAULT] if hopper else [triton.DEFAULT]
    if args.sweep and hopper:
        tunings += [
            gluon.Tuning(ring=kib << 10, shares_per_sm=c, pieces=p, early=e)
            for (c, kib), p, e in itertools.product(
                ((1, 128), (1, 192), (2, 64), (2, 96)), (8, 16), (True, False)
            )
        ]
    print(f"reading alone (torch.sum): {read_rate():.2f} TB/s", flush=True)
    rows = []
    for name, (lengths, queries) in cases(args.only).items():
        blocks = sum(-(-n // SHAPE.page) for n in lengths)
        case = make_case(SHAPE, lengths, [queries] * len(lengths), layers_for(lengths, blocks))
        found = []
        for tuning in tunings:
            try:
                us, gap = measure(case, tuning)
            except Exception as problem:
                print(name, tuning, str(problem)[:100], file=sys.stderr)
                continue
            found.append((us, gap, tuning))
            tbs = sum(lengths) * SHAPE.key_bytes / us / 1e6
            kind = type(tuning).__module__.rpartition(".")[2]
            figures = {"case": name, "kernel": kind, "us": us, "tb_s": tbs, "error": gap}
            rows.append(figures | asdict(tuning))
        rates = sum(lengths) * SHAPE.key_bytes / 1e6
        worst = max(gap for _, gap, _ in found)
        print(
            f"{name:22}",
            *(f"{us:7.1f} µs {rates / us:5.2f} TB/s" for us, _, _ in found[:2]),
            f"error {worst:.1e}",
            *(f"| {us:.1f} {tuning}" for us, _, tuning in sorted(found, key=_us)[: 3 * args.sweep]),
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
