"""What sleeping gives back of a GPU and how long it takes: python bench/engine/sleep.py MODEL.

    python bench/engine/sleep.py MODEL [--levels 1,2 --rounds 2 --out FILE]

MODEL is a prepared folder, or a name of ``rig.DUMMIES`` (qwen3-8b and others) for weights that no
file holds, which level 2 then makes anew instead of loading them. Each round sleeps and wakes up,
and draws the same greedy tokens before and after (nothing is cached). Memory is what nvidia-smi
says of the whole device, so nobody else should be on it. Without a GPU: SmolLM2's folder with
``--device cpu``, where memory is this process's resident bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from pooling_shapes import SHAPES, dummy_folder

from tandem.llm import LLM

PROMPT = [(7 * number) % 290 + 5 for number in range(200)]


def used_mib(device: str) -> int:
    """Of the first visible GPU by nvidia-smi, or resident memory of this process."""
    if device == "cpu":
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024
    bus = torch.cuda.get_device_properties(0).uuid
    asked = ["nvidia-smi", f"--id=GPU-{bus}", "--query-gpu=memory.used"]
    found = subprocess.run(
        [*asked, "--format=csv,noheader,nounits"], check=True, capture_output=True, text=True
    )
    return int(found.stdout.split()[0])


def timed(run: Any, *words: Any) -> float:
    """Seconds of a call."""
    started = time.perf_counter()
    run(*words)
    return time.perf_counter() - started


def tokens(llm: LLM) -> list[int]:
    """Sixteen greedy ones."""
    params = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


def one_round(llm: LLM, level: int, device: str) -> dict[str, Any]:
    """Sleep, wake up; MiB in use, seconds, and whether tokens stayed."""
    before, awake = tokens(llm), used_mib(device)
    row: dict[str, Any] = {"level": level, "awake_mib": awake}
    row["sleep_s"] = timed(llm.sleep, level)
    row["asleep_mib"] = used_mib(device)
    row["wake_weights_s"] = timed(llm.wake_up, ["weights"])
    row["with_weights_mib"] = used_mib(device)
    row["wake_kv_s"] = timed(llm.wake_up, ["kv_cache"])
    row["awake_again_mib"] = used_mib(device)
    row["first_tokens_s"] = timed(tokens, llm)
    row["same_tokens"] = tokens(llm) == before
    return row


def main() -> None:
    """Print a line a round, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--levels", default="1,2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    made = args.model in SHAPES
    folder = str(dummy_folder(args.model)) if made else args.model
    found = []
    options: dict[str, Any] = {"device": device, "enable_prefix_caching": False}
    with LLM(folder, load_format="dummy" if made else "auto", **options) as llm:
        for level in map(int, args.levels.split(",")):
            for _ in range(args.rounds):
                found.append(one_round(llm, level, device))
                print({k: round(v, 2) for k, v in found[-1].items()}, flush=True)
    if args.out is not None:
        on = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        said = {"device": on, "model": args.model, "rounds": found}
        args.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
