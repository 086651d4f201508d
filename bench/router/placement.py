"""How long elastic placement keeps the router's event loop, by the size of the fleet.

No stream gets a token while ``ElasticPolicy.place()`` runs. Every worker has a queue, decodes and
measured times of its own; where it is "quiet" prefill workers decode nothing and nothing is cached,
where it is "busy" they do, and prompts have cached starts, and with "pulls" each worker may pull
these from four peers. With ``--before`` an earlier tree's placement is timed by its own Python in
the same run, rounds in turns, and ratios are those of pairs of rounds. Times are the processor's,
so that others on the machine take away nothing but its caches. Both trees have to choose the same
ways, and to say the same of them.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && make setup)
    .venv/bin/python bench/router/placement.py --before /tmp/before

    .venv/bin/python bench/router/placement.py            # this tree alone
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.damage import Targets
from tandem.router.placement.elastic import ElasticPolicy
from tandem.router.placement.snapshot import (
    Exclusions,
    FleetSnapshot,
    LinkPace,
    PromptFacts,
    WorkerView,
)

HERE = Path(__file__).resolve()
SIZES = (1, 2, 4, 8, 16)
LOADS = ("quiet", "busy", "pulls")
PULL_PEERS = 4


def main() -> None:
    """Take turns, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a tree of the earlier commit, set up")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=20, help="that are placed in a round")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--obey", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.obey:
        obey(args.prompts)
        return
    trees = {"now": HERE.parents[2]}
    if args.before is not None:
        trees = {"before": args.before.resolve(), **trees}
    sides = {name: start(tree, args.prompts) for name, tree in trees.items()}
    rows = []
    print("| prefill x decode, load | " + " | ".join(f"{each}, ms" for each in sides), end="")
    print(" | ratio (quartiles) |" if len(sides) > 1 else " |")
    print("|---|" + "---|" * (2 * len(sides) - 1))
    for size in SIZES:
        for load in LOADS:
            row = measure(sides, size, load, args.rounds)
            rows.append(row)
            print(line(row, list(sides)), flush=True)
    for side in sides.values():
        assert side.stdin is not None
        side.stdin.close()
        side.wait(30)
    if args.out is not None:
        said = {name: commit(tree) for name, tree in trees.items()}
        content = {**said, "rounds": args.rounds, "prompts": args.prompts, "rows": rows}
        args.out.write_text(json.dumps(content, indent=1) + "\n")


def measure(
    sides: dict[str, subprocess.Popen[str]], size: int, load: str, rounds: int
) -> dict[str, Any]:
    """Medians in milliseconds a placement, and the ratios of pairs of rounds."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    chosen = set()
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            answer = ask(sides[name], f"{size} {load}")
            chosen.add(answer["chosen"])
            if number:  # the first one warms up
                found[name].append(answer["ms"])
    if len(chosen) > 1:
        raise RuntimeError(f"{size} x {size}, {load}: the trees do not choose the same workers")
    row: dict[str, Any] = {"size": size, "load": load}
    row |= {name: statistics.median(each) for name, each in found.items()}
    if "before" in found:
        ratios = [a / b for a, b in zip(found["before"], found["now"], strict=True)]
        row["ratio_quartiles"] = statistics.quantiles(ratios, n=4)
    return row


def line(row: dict[str, Any], sides: list[str]) -> str:
    """One row of the table."""
    cells = [f"{row['size']} x {row['size']}, {row['load']}"]
    cells += [f"{row[name]:.3f}" for name in sides]
    if "ratio_quartiles" in row:
        low, middle, high = row["ratio_quartiles"]
        cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
    return f"| {' | '.join(cells)} |"


def start(tree: Path, prompts: int) -> subprocess.Popen[str]:
    """One tree's placement, by its own Python, which makes a round for each line."""
    command = [str(tree / ".venv/bin/python"), str(HERE), "--obey", "--prompts", str(prompts)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def ask(side: subprocess.Popen[str], round_of: str) -> dict[str, Any]:
    """What one round came to."""
    assert side.stdin is not None
    assert side.stdout is not None
    side.stdin.write(f"{round_of}\n")
    side.stdin.flush()
    answer = side.stdout.readline()
    if not answer:
        raise RuntimeError(f"{side.args!r} ended with {side.wait(10)}")
    found: dict[str, Any] = json.loads(answer)
    return found


def commit(tree: Path) -> str:
    """The commit of a tree."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def obey(prompts: int) -> None:
    """In a tree's own Python: a round for each line of standard input."""
    policy = ElasticPolicy(0, 0.1, Targets(0.3, 0.025))
    for asked in sys.stdin:
        size, load = asked.split()
        fleet = fleet_of(int(size), load)
        placed = [prompt_of(number, fleet, load) for number in range(prompts)]
        seconds, chosen = [], []
        for prompt in placed:
            began = time.thread_time()
            placement = policy.place(prompt, fleet, 0.0, Exclusions())
            seconds.append(time.thread_time() - began)
            assert placement is not None
            chosen.append(placement.rule)
        digest = zlib.crc32("\n".join(chosen).encode())
        print(json.dumps({"ms": 1e3 * statistics.median(seconds), "chosen": digest}), flush=True)


def fleet_of(size: int, load: str) -> FleetSnapshot:
    """So many workers of each role, all linked; the same for an equal size and load."""
    random_ = random.Random(size)
    prefill = [worker(number, WorkerRole.PREFILL, load, random_) for number in range(size)]
    decode = [worker(size + number, WorkerRole.DECODE, load, random_) for number in range(size)]
    links = [(p.incarnation, d.incarnation) for p in prefill for d in decode]
    everybody = [each.incarnation for each in (*prefill, *decode)]
    pulls = {
        (everybody[(at + step) % len(everybody)], each)
        for at, each in enumerate(everybody)
        for step in range(1, min(PULL_PEERS, len(everybody) - 1) + 1)
    }
    pulls = pulls if load == "pulls" else set()
    paces = {
        each: LinkPace(12e9, random_.randrange(100_000_000), random_.uniform(0.01, 0.04))
        for each in sorted({*links, *pulls})
    }
    workers = (*prefill, *decode)
    return FleetSnapshot(workers, frozenset(links), paces, pull_links=frozenset(pulls))


def worker(number: int, role: WorkerRole, load: str, random_: random.Random) -> WorkerView:
    """With the measured times of a large GPU, give or take a tenth; prefill workers decode
    nothing where it is quiet."""
    slow = random_.uniform(0.9, 1.1)
    decodes = role is WorkerRole.DECODE or load != "quiet"
    streams = random_.randrange(1, 120) if decodes else 0
    waiting = random_.randrange(20_000)
    return WorkerView(
        incarnation=Incarnation(number.to_bytes(16, "big")),
        role=role,
        fingerprint="f",
        name=f"{role}{number}",
        max_model_len=40_000,
        max_num_seqs=256,
        num_running=streams,
        num_waiting=waiting // 2_000,
        waiting_tokens=waiting,
        num_decoding=streams,
        context_tokens=streams * random_.randrange(500, 5_000),
        decode_steps=tuple((1 << at, slow * (0.004 + 5e-5 * (1 << at))) for at in range(9)),
        context_s=4.5e-8,
        prompt_steps=tuple((64 << at, slow * (0.004 + 2e-5 * (64 << at))) for at in range(8)),
        beside_steps=tuple((64 << at, slow * 2.2e-5 * (64 << at)) for at in range(6)),
        steepness=4.2e-5,
        chunk_tokens=2_048 if role is WorkerRole.PREFILL else 700,
        mixed_chunk_tokens=700,
        bounds_steps=True,
        residence_s=random_.uniform(1.0, 5.0) if decodes else 0.1,
        prompt_share=random_.random(),
        prompts_per_s=20 * random_.random(),
        total_blocks=20_000,
        free_blocks=random_.randrange(1_000, 20_000),
        token_bytes=70_000.0,
        num_legs=streams // 2,
        num_streams=streams,
    )


def prompt_of(number: int, fleet: FleetSnapshot, load: str) -> PromptFacts:
    """Of any length; some workers have a part of its start."""
    random_ = random.Random(number)
    tokens = random_.randrange(500, 16_000)
    cached = [each.incarnation for each in fleet.workers if random_.random() < 0.3]
    hits = (
        {} if load == "quiet" else {each: random_.randrange(tokens) // 16 * 16 for each in cached}
    )
    return PromptFacts(num_tokens=tokens, max_new_tokens=256, hits=hits)


if __name__ == "__main__":
    main()
