"""Paged decode attention against the memory's read rate: python bench/kernels/decode_attention.py.

Every launch reads another layer of the slab (cold pages) and the figure includes the plan, made
once for all layers as in a decode step. --sweep tries tunings, and prints each case's best.
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

from tandem.kernels.attention.decode import triton as kernel
from tandem.kernels.measure.paged import Case, Shape, error, make_case
from tandem.kernels.measure.timing import L2_BYTES, replay_us

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
    even += [(64, 1024), (128, 2048), (256, 1024)]
    out = {f"{b} x {n}": ([n] * b, 1) for b, n in even}
    out |= {f"{b} x ~{n}": (tenfold(b, n), 1) for b, n in ((8, 2048), (32, 2048), (32, 8192))}
    out |= {f"{b} x {n}, 4 queries": ([n] * b, 4) for b, n in ((1, 2048), (8, 2048), (32, 2048))}
    return {k: v for k, v in out.items() if wanted in k}


def layers_for(lengths: list[int], blocks: int) -> int:
    """Enough layers that none is in L2 when its turn comes, within 40 GB."""
    one = blocks * SHAPE.page * SHAPE.key_bytes
    return max(2, min(36, (40 << 30) // one, max(36, 4 * L2_BYTES // one)))


def run_all(case: Case, out: torch.Tensor, tuning: kernel.Tuning) -> None:
    """A step: the plan, then every layer."""
    batch = replace(case.batch, memo={})
    for layer in range(case.slab.shape[1]):
        kernel.launch(case.q[layer], case.layer(layer), batch, SCALE, out, None, tuning)


def measure(case: Case, tuning: kernel.Tuning) -> tuple[float, float]:
    """µs a layer and relative error; NaN in `out` before, so that an unwritten row shows."""
    out = torch.full_like(case.q[0], torch.nan)
    run_all(case, out, tuning)
    gap = error(case, case.slab.shape[1] - 1, out, SCALE)
    return replay_us(lambda: run_all(case, out, tuning), case.slab.shape[1]), gap


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
    tunings = [kernel.DEFAULT]
    if args.sweep:
        tunings += [
            kernel.Tuning(shares_per_sm=c, tile=t, stages=s, pieces=p)
            for c, t, s, p in itertools.product((1, 2, 3), (32, 64), (3, 4), (8, 16))
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
            rows.append(asdict(tuning) | {"case": name, "us": us, "tb_s": tbs, "error": gap})
        best = sorted(found, key=lambda f: f[0])[:3]
        worst = max(f[1] for f in found)
        default = found[0][0]
        rates = sum(lengths) * SHAPE.key_bytes / 1e6
        print(
            f"{name:22} default {default:7.1f} µs {rates / default:5.2f} TB/s"
            f" | best {best[0][0]:7.1f} µs {rates / best[0][0]:5.2f} TB/s error {worst:.1e}",
            *(
                (f"{b[0]:.1f}", b[2].shares_per_sm, b[2].tile, b[2].stages, b[2].pieces)
                for b in best
            ),
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
