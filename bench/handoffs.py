"""Hand-offs of two services in one process: python bench/handoffs.py [--rounds 5] [--device cuda].

What a hand-off costs besides computing: control messages, machines, packing, reading, verifying.
For each of ``--connectors``: hand-offs a second, processors' time of one, bytes a second. Of short
prompts (one part, where the machines count) and of long ones (where bytes do), eight at a time; the
best of ``--rounds``. Prints JSON. On a GPU blocks are those of Qwen3-8B at 64 tokens (9 MiB), and a
long prompt has 2,048 tokens. For ``shm_agent`` a node's agent runs in a process of its own, whose
processors' time is told as ``agent_cpu_ms``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from tandem.kernels.memory.shared import shared_tensor
from tandem.kvtransfer import events
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.protocol.card import Fingerprint
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.kv import FirstToken
from tandem.protocol.layout import KVGroup, KVLayout

LAYOUT = KVLayout(
    (KVGroup(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16"),)
)
QWEN3_8B = KVLayout(
    (KVGroup(num_layers=36, num_kv_heads=8, head_dim=128, block_size=64, dtype="bfloat16"),)
)
NUM_BLOCKS = {"cpu": 1024, "cuda": 512}
AT_ONCE = 8
ROUTER = b"R" * 16
SECONDS = 60.0
CASES = {
    "cpu": {"short": (4, 400), "long": (128, 40)},
    "cuda": {"short": (4, 100), "long": (32, 40)},
}
"""Blocks of a prompt, and hand-offs of one round."""


class Done:
    """A fence that has been seen."""

    def done(self) -> bool:
        """Yes."""
        return True


class Pair:
    """Both services, linked."""

    def __init__(self, connector: str, device: str, **settings: Any) -> None:
        config = KVTransferConfig(kv_connector=connector, kv_control_port=0, **settings)
        self.layout = LAYOUT if device == "cpu" else QWEN3_8B
        self.num_blocks, self.device = NUM_BLOCKS[device], device
        self.woken = threading.Event()
        self.me, self.peer = new_incarnation(), new_incarnation()
        self.producer: Any = self._made(HandoffProducer, config, self.peer)
        self.consumer: Any = self._made(HandoffConsumer, config, self.me)
        self.consumer.set_peers([self.producer.control])
        self._until(lambda: self.consumer.peer_up(self.peer))
        self._until(lambda: self.me in self.producer.consumers())

    def _made(self, kind: Any, config: KVTransferConfig, incarnation: Any) -> Any:
        made = kind(
            config,
            slab=self._slab(),
            layout=self.layout,
            num_blocks=self.num_blocks,
            fingerprint=Fingerprint(revision="bench", dtype="bfloat16", layout=self.layout),
            incarnation=incarnation,
            registry=CollectorRegistry(),
            notify=self.woken.set,
        )
        made.start()
        return made

    def _slab(self) -> torch.Tensor:
        size = self.num_blocks * self.layout.block_bytes
        if self.device == "cpu":
            return shared_tensor(size).fill_(1).view(self.num_blocks, -1)
        return torch.ones(size, dtype=torch.uint8, device=self.device).view(self.num_blocks, -1)

    def _until(self, check: Any) -> None:
        end = time.monotonic() + SECONDS
        while not check():
            assert time.monotonic() < end, "nothing happens"
            self.woken.wait(0.01)
            self.woken.clear()

    def run(self, name: str, blocks: int, count: int) -> tuple[float, float]:
        """Seconds for so many hand-offs, ``AT_ONCE`` at a time, and of processors."""
        most = self.num_blocks // blocks
        tables = [list(range(n * blocks, (n + 1) * blocks)) for n in range(most)]
        spare = tables[:AT_ONCE]
        live: dict[RequestKey, list[int]] = {}
        begun = ended = released = 0
        tokens = blocks * self.layout.block_size
        started, spent = time.perf_counter(), time.process_time()

        def step() -> bool:
            nonlocal begun, ended, released
            while spare and begun < count:
                key, table = RequestKey(ROUTER, f"{name}{begun}", 0), spare.pop()
                begun += 1
                live[key] = table
                self.consumer.open(key, self.peer, budget_ms=None)
                refused = self.producer.admit(
                    key, num_tokens=tokens, num_blocks=blocks, consumer=self.me, budget_ms=None
                )
                assert refused is None, refused
                self.producer.computed(key, table, tokens, Done())
                self.producer.final(key, [FirstToken(0, 1)], None)
                self.producer.finished(key)
            released += sum(isinstance(each, events.Released) for each in self.producer.poll())
            for event in self.consumer.poll():
                if isinstance(event, events.Ready):
                    self.consumer.begin_load(event.key, live[event.key], 0, tokens)
                    continue
                assert isinstance(event, events.Loaded), event
                spare.append(live.pop(event.key))
                ended += 1
            return ended == released == count

        self._until(step)
        return time.perf_counter() - started, time.process_time() - spent

    def close(self) -> None:
        """End both."""
        self.consumer.close()
        self.producer.close()


class Agent:
    """`tandem node-agent` in a process of its own."""

    def __init__(self, folder: str) -> None:
        words = [sys.executable, "-m", "tandem.cli", "node-agent", "--kv-node-folder", folder]
        self.process = subprocess.Popen([*words, "--log-level", "warning"])
        end = time.monotonic() + SECONDS
        while not (Path(folder) / "agent.sock").exists():
            assert time.monotonic() < end, "no agent"
            time.sleep(0.05)

    def spent(self) -> float:
        """Seconds of processors until now."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def agent_for(connector: str, settings: dict[str, Any]) -> Iterator[Agent | None]:
    """The agent that a connector wants, in whose folder the services meet."""
    if not connector.endswith("_agent"):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        agent = Agent(folder)
        settings["kv_node_folder"] = folder
        try:
            yield agent
        finally:
            agent.process.terminate()
            agent.process.wait(SECONDS)


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connectors", default="memory,memory_blocks,shm,tcp,nixl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tcp-streams", type=int, help="none is as workers choose")
    parser.add_argument("--slot-mib", type=int, help="of a slot; none is as workers choose")
    asked = parser.parse_args()
    settings: dict[str, Any] = {"kv_tcp_streams": asked.tcp_streams}
    if asked.slot_mib:
        settings["kv_slot_bytes"] = asked.slot_mib << 20
    found: dict[str, dict[str, dict[str, float]]] = {}
    for connector in asked.connectors.split(","):
        with agent_for(connector, more := dict(settings)) as agent:
            pair = Pair(connector, asked.device, **more)
            for case, (blocks, count) in CASES[asked.device].items():
                spent = agent.spent() if agent else 0.0
                rounds = range(asked.rounds)
                times = [pair.run(f"{case}{n}-", blocks, count) for n in rounds]
                best, cpu = (min(each) for each in zip(*times, strict=True))
                row = found.setdefault(connector, {})[case] = {
                    "handoffs_per_s": round(count / best, 1),
                    "cpu_ms": round(1000 * cpu / count, 3),
                    "gb_per_s": round(count * blocks * pair.layout.block_bytes / best / 1e9, 3),
                }
                if agent:
                    each = (agent.spent() - spent) / (count * asked.rounds)
                    row["agent_cpu_ms"] = round(1000 * each, 3)
            pair.close()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
