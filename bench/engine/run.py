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


def main() -> None:
    """Measure what was asked for, print as it comes, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only", default="start,decode,prompt,saturated,profile")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--settings", default="{}", help="JSON of the engine's settings")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(name)s %(message)s")
    wanted = args.only.split(",")

    import profiler
    import steps
    import torch
    from rig import Rig

    imported = time.perf_counter() - STARTED
    rig = Rig.start(layers=args.layers, **json.loads(args.settings))
    ready = time.perf_counter() - STARTED
    first = steps.prompt(rig, 512, runs=0)
    figures: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "start": {
            "imports_s": imported,
            "ready_s": ready,
            "first_token_s": time.perf_counter() - STARTED,
            "kv_tokens": rig.core.capacity.num_blocks * rig.core.manager.block_size,
        },
    }
    print(json.dumps(figures), first, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)

    def note(kind: str, row: dict[str, Any]) -> None:
        figures.setdefault(kind, []).append(row)
        shown = {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}
        print(kind, {key: v for key, v in shown.items() if not key.startswith("runs")}, flush=True)
        (args.out / "engine.json").write_text(json.dumps(figures, indent=1))

    if "prompt" in wanted:
        for length in steps.PROMPTS:
            note("prompt", steps.prompt(rig, length))
    if "decode" in wanted:
        for batch, context in steps.DECODES:
            note("decode", steps.decode(rig, batch, context))
    if "sampled" in wanted:
        for batch in (1, 64, 256):
            note("decode", steps.decode(rig, batch, 512, sampled=True))
    if "saturated" in wanted:
        note("saturated", steps.saturated(rig))
    if "profile" in wanted:
        found = [
            profiler.decode(rig, 1, 512),
            profiler.decode(rig, 64, 1024),
            profiler.decode(rig, 256, 1024),
            profiler.prompt(rig, 8192),
        ]
        (args.out / "profile.json").write_text(json.dumps(found, indent=1))
        for each in found:
            print(each["what"], f"span {each['span_us']:.0f} us, busy {each['busy_us']:.0f} us")
            for row in each["kernels"][:16]:
                print(f"  {row['us']:9.1f} us {row['launches']:6.1f}  {row['kernel']}")
    free, total = torch.cuda.mem_get_info()
    figures["memory"] = {
        "used_gib": (total - free) / 2**30,
        "torch_reserved_gib": torch.cuda.memory_reserved() / 2**30,
        "torch_allocated_gib": torch.cuda.memory_allocated() / 2**30,
    }
    (args.out / "engine.json").write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
