"""Everything about one GPU's engine in one call: python bench/engine/run.py --out FOLDER.

Writes engine.json (figures) and profile.json (kernels) and prints a table. Needs a CUDA device.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
KINDS = ("start", "prompt", "decode", "sampled", "saturated", "closed", "whole", "profile")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", default="qwen3-8b", help="a model's, or one of rig.DUMMIES")
    parser.add_argument("--decodes", help="JSON: [[batch, context], ...]")
    parser.add_argument("--parts", action="store_true", help="time the parts of the host's work")
    parser.add_argument("--settings", default="{}", help="JSON of the engine's settings")
    return parser.parse_args()


class Report:
    """Figures so far, printed and written as they come."""

    def __init__(self, out: Path) -> None:
        self.figures: dict[str, Any] = {}
        self._out = out
        out.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, value: Any) -> None:
        """One figure."""
        self.figures[name] = value
        print(name, json.dumps(value), flush=True)
        self._write()

    def add(self, kind: str, row: dict[str, Any]) -> None:
        """One more row of a kind."""
        self.figures.setdefault(kind, []).append(row)
        shown = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
        print(kind, {key: v for key, v in shown.items() if not key.startswith("runs")}, flush=True)
        self._write()

    def kernels(self, found: list[dict[str, Any]]) -> None:
        """Parts of a step."""
        (self._out / "profile.json").write_text(json.dumps(found, indent=1))
        for each in found:
            print(each["what"], f"span {each['span_us']:.0f} us, busy {each['busy_us']:.0f} us")
            for row in each["kernels"][:16]:
                print(f"  {row['us']:9.1f} us {row['launches']:6.1f}  {row['kernel']}")

    def _write(self) -> None:
        (self._out / "engine.json").write_text(json.dumps(self.figures, indent=1))


def start(args: argparse.Namespace, report: Report) -> Any:
    """The engine, and what it took until its first token."""
    import steps
    import torch
    from rig import Rig

    imported = time.perf_counter() - STARTED
    rig = Rig.start(args.folder, layers=args.layers, **json.loads(args.settings))
    ready = time.perf_counter() - STARTED
    if args.parts:
        rig.time_parts()
    steps.prompt(rig, 512, runs=0)
    report.put(
        "start",
        {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "imports_s": imported,
            "ready_s": ready,
            "first_token_s": time.perf_counter() - STARTED,
            "kv_tokens": rig.core.capacity.num_blocks * rig.core.manager.block_size,
        },
    )
    return rig


def measure(rig: Any, args: argparse.Namespace, report: Report) -> None:
    """Parse the command line."""
    import profiler
    import steps

    wanted = args.only.split(",")
    if "prompt" in wanted:
        for length in steps.PROMPTS:
            report.add("prompt", steps.prompt(rig, length))
    if "decode" in wanted:
        for batch, context in json.loads(args.decodes) if args.decodes else steps.DECODES:
            report.add("decode", steps.decode(rig, batch, context))
    if "sampled" in wanted:
        for batch in (1, 64, 256):
            report.add("decode", steps.decode(rig, batch, 512, sampled=True))
    if "saturated" in wanted:
        report.add("saturated", steps.saturated(rig))
    _streams(rig, wanted, report)
    if "profile" in wanted:
        decodes = [profiler.decode(rig, batch, 1024) for batch in (32, 64, 256)]
        others = [profiler.mixed(rig, 64, 1024)]
        others += [profiler.prompt(rig, length) for length in (512, 8192)]
        report.kernels([profiler.decode(rig, 1, 512), *decodes, *others])


def _streams(rig: Any, wanted: list[str], report: Report) -> None:
    import steps

    if "closed" in wanted:
        for streams in (32, 64, 256):
            report.add("closed", steps.closed(rig, streams))
    if "whole" in wanted:
        for streams, requests in ((64, 640), (256, 1536)):
            report.add("whole", steps.whole(rig, streams, requests))


def main() -> None:
    """Start, measure, and say what memory it took."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(name)s %(message)s")
    report = Report(args.out)
    rig = start(args, report)
    measure(rig, args, report)
    import torch

    free, total = torch.cuda.mem_get_info()
    report.put(
        "memory",
        {
            "used_gib": (total - free) / 2**30,
            "torch_reserved_gib": torch.cuda.memory_reserved() / 2**30,
            "torch_allocated_gib": torch.cuda.memory_allocated() / 2**30,
        },
    )


if __name__ == "__main__":
    main()
