"""Time that placement blocks the router's event loop, by the size of the fleet.

    .venv/bin/python bench/router/placement.py

No stream gets a token while ``PlacementPolicy.place()`` runs. Every worker has a queue, decodes and
measured times of its own. "quiet": prefill workers decode nothing, and nothing is cached. "busy":
they do, and prompts have cached starts. "pulls": each worker may also pull these from four peers.
Times are those of the processor, medians over prompts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from tandem.protocol.card import WorkerRole
from tandem.protocol.ids import Incarnation
from tandem.router.placement.forecast import Targets
from tandem.router.placement.policy import PlacementPolicy
from tandem.router.placement.snapshot import (
    Exclusions,
    FleetSnapshot,
    LinkThroughput,
    PromptFacts,
    WorkerView,
)

SIZES = (1, 2, 4, 8, 16)
LOADS = ("quiet", "busy", "pulls")
PULL_PEERS = 4


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=200, help="placed for each size and load")
    args = parser.parse_args()
    print("| prefill x decode, load | ms |\n|---|---|")
    policy = PlacementPolicy(Targets(0.3, 0.025), 0.05)
    for size in SIZES:
        for load in LOADS:
            fleet, seconds = fleet_of(size, load), []
            for prompt in [prompt_of(number, fleet, load) for number in range(args.prompts)]:
                began = time.thread_time()
                placement = policy.place(prompt, fleet, Exclusions())
                seconds.append(time.thread_time() - began)
                assert placement is not None
            print(f"| {size} x {size}, {load} | {1e3 * statistics.median(seconds):.3f} |")


def fleet_of(size: int, load: str) -> FleetSnapshot:
    """Return so many workers of each role, all linked; the same for an equal size and load."""
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
        each: LinkThroughput(12e9, random_.randrange(100_000_000))
        for each in sorted({*links, *pulls})
    }
    workers = (*prefill, *decode)
    return FleetSnapshot(workers, frozenset(links), paces, pull_links=frozenset(pulls))


def worker(number: int, role: WorkerRole, load: str, random_: random.Random) -> WorkerView:
    """Return a worker with the times of a large GPU, give or take a tenth."""
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
        mixed_steps=tuple((64 << at, slow * 2.2e-5 * (64 << at)) for at in range(6)),
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
    """Return a prompt of any length; some workers have a part of its start cached."""
    random_ = random.Random(number)
    tokens = random_.randrange(500, 16_000)
    cached = [each.incarnation for each in fleet.workers if random_.random() < 0.3]
    hits = (
        {} if load == "quiet" else {each: random_.randrange(tokens) // 16 * 16 for each in cached}
    )
    return PromptFacts(num_tokens=tokens, max_new_tokens=256, hits=hits)


if __name__ == "__main__":
    main()
