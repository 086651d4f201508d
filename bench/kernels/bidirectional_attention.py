"""Attention of whole prompts in TFLOP/s: python bench/kernels/bidirectional_attention.py [--sweep].

4 x head_dim operations for each pair of tokens of one prompt. --sweep tries tunings of the Triton
kernel; torch's SDPA over a padded batch stands beside it where all prompts are of one length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.attention.bidirectional import WholePrompts, triton
from tandem.kernels.measure.timing import replay_us

HEADS = 16
CASES: dict[str, list[int]] = {
    "16 x 512": [512] * 16,
    "64 x 128": [128] * 64,
    "1 x 8192": [8192],
    "mixed": [31, 512, 77, 300, 128, 450, 12, 256] * 4,
}


def main() -> None:
    """Measure, print a line a case, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tunings = [triton.DEFAULT, triton.NARROW]
    if args.sweep:
        tunings += [
            triton.Tuning(rows=rows, keys=keys, warps=warps, stages=stages)
            for rows, keys, warps, stages in itertools.product(
                (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
            )
        ]
    rows = []
    for name, lengths in CASES.items():
        rates = {str(each): tflops(lengths, args.head_dim, each) for each in tunings}
        if len(set(lengths)) == 1:
            rates["SDPA"] = tflops(lengths, args.head_dim, None)
        for what, rate in sorted(rates.items(), key=lambda each: -each[1]):
            print(f"{name:10} {rate:7.1f} TFLOP/s  {what}", flush=True)
        rows.append({"case": name, "head_dim": args.head_dim, "tflops": rates})
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1) + "\n")


def tflops(lengths: list[int], dim: int, tuning: triton.Tuning | None) -> float:
    """Of one launch over bfloat16; None is SDPA. A tuning that does not fit the device is 0."""
    tokens = sum(lengths)
    q, k, v = torch.randn(tokens, 3, HEADS, dim, device="cuda", dtype=torch.bfloat16).unbind(1)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    prompts = WholePrompts(starts, max(lengths))
    out = torch.empty(tokens, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    scale = 1 / math.sqrt(dim)

    def run() -> None:
        if tuning is not None:
            triton.launch(q, k, v, prompts, scale, out, tuning)
            return
        batched = (each.view(len(lengths), -1, HEADS, dim).transpose(1, 2) for each in (q, k, v))
        queries, keys, values = batched
        scaled_dot_product_attention(queries, keys, values, scale=scale)

    try:
        run()
    except Exception as error:  # shared memory of a tuning may not be there
        print(f"{tuning}: {error}")
        return 0.0
    pairs = sum(each * each for each in lengths)
    return 4 * dim * HEADS * pairs / replay_us(run, 1) / 1e6


if __name__ == "__main__":
    main()
