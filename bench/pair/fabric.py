"""Hand-offs between two processes with a GPU each: python bench/pair/fabric.py --out FOLDER.

How long KV that a prefill worker has computed takes from WANT until a decode worker may use it
(COMMITTED), for prompts of several lengths whose blocks are scattered at both ends, by connector.
Blocks are those of Qwen3-8B at 64 tokens (9 MiB). Services are the real ones, in a process each;
engines are scripted. Bytes are compared. Writes fabric.json and prints a table.
Without GPUs: ``--device cpu --connectors shm --scale 4``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry

from tandem.kvtransfer import events
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.memory.device import MappedAllocator
from tandem.memory.shared import shared_tensor
from tandem.protocol.card import Fingerprint, KVGroup, KVLayout
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey, new_incarnation
from tandem.protocol.kv import FirstToken

LENGTHS = (256, 2048, 8192, 30016)
BLOCK = 64
LAYOUT = KVLayout(
    (KVGroup(num_layers=36, num_kv_heads=8, head_dim=128, block_size=BLOCK, dtype="bfloat16"),)
)
ROUTER = b"R" * 16
SECONDS = 60.0
PHASES = ("read", "load", "commit")


class Done:
    """A fence that has been seen."""

    def done(self) -> bool:
        """Yes."""
        return True


def table(name: str, blocks: int, of: int) -> list[int]:
    """Scattered blocks, the same whenever asked."""
    return random.Random(name).sample(range(of), blocks)


def hashes(name: str, blocks: int) -> tuple[BlockHash, ...]:
    """Return the hashes of a prompt's blocks, as an engine computes them."""
    words = (f"{name}/{number}".encode() for number in range(blocks))
    return tuple(BlockHash(blake2b(each, digest_size=16).digest()) for each in words)


class Worker:
    """One end, told what to do by lines on standard input."""

    def __init__(self, role: str, asked: argparse.Namespace) -> None:
        config = KVTransferConfig(
            kv_connector=asked.connectors,
            kv_control_port=0,
            kv_node_folder=asked.folder,
            kv_secret="bench",
        )
        self.num_blocks = asked.blocks
        self.woken, self.registry = threading.Event(), CollectorRegistry()
        self.me, self.loaded = new_incarnation(), 0
        size = self.num_blocks * LAYOUT.block_bytes
        if asked.device == "cpu":
            flat = shared_tensor(size)
        else:
            torch.cuda.set_device(asked.gpu)
            flat = MappedAllocator(torch.device("cuda", asked.gpu))(size)[:size]
        self.kv_cache = flat.view(self.num_blocks, -1)
        if role == "producer":
            numbers = torch.arange(self.num_blocks, dtype=torch.int32, device=flat.device)
            self.kv_cache.view(torch.int32)[:] = numbers[:, None] + 1
        kind: Any = {"producer": HandoffProducer, "consumer": HandoffConsumer}[role]
        self.service = kind(
            config,
            kv_cache=self.kv_cache,
            layout=LAYOUT,
            num_blocks=self.num_blocks,
            fingerprint=Fingerprint(revision="bench", dtype="bfloat16", layout=LAYOUT),
            incarnation=self.me,
            registry=self.registry,
            notify=self.woken.set,
        )
        self.service.start()
        self.ready: dict[RequestKey, int] = {}
        self.ended: set[RequestKey] = set()

    def until(self, check: Callable[[], object]) -> None:
        """Poll as a step loop would."""
        end = time.monotonic() + SECONDS
        while not check():
            assert time.monotonic() < end, "nothing happens"
            self.woken.wait(0.01)
            self.woken.clear()
            for event in self.service.poll():
                if isinstance(event, events.Ready):
                    self.ready[event.key] = event.num_tokens
                elif isinstance(event, events.Loaded | events.Released):
                    self.ended.add(event.key)
                else:
                    raise RuntimeError(f"{event}")

    def export(self, name: str, tokens: str, consumer: str) -> str:
        """P: these tokens are computed."""
        key, count = RequestKey(ROUTER, name, 0), int(tokens)
        blocks = table(name, count // BLOCK, self.num_blocks)
        refused = self.service.admit(
            key,
            num_tokens=count,
            consumer=Incarnation(bytes.fromhex(consumer)),
            budget_ms=None,
        )
        assert refused is None, refused
        self.service.computed(key, (tuple(blocks),), count, Done(), hashes(name, len(blocks)))
        self.service.final(key, [FirstToken(0, 1)], None)
        self.service.finished(key)
        return "ok"

    def released(self, name: str) -> str:
        """P: wait until the blocks are its own again."""
        self.until(lambda: RequestKey(ROUTER, name, 0) in self.ended)
        return "ok"

    def meet(self, control: str, peer: str) -> str:
        """D: link."""
        incarnation = Incarnation(bytes.fromhex(peer))
        self.service.set_peers([control])
        self.until(lambda: self.service.peer_up(incarnation))
        return "ok"

    def open(self, name: str, peer: str) -> str:
        """D: ask for a key."""
        incarnation = Incarnation(bytes.fromhex(peer))
        self.service.open(RequestKey(ROUTER, name, 0), incarnation, budget_ms=None)
        return "ok"

    def load(self, name: str) -> str:
        """D: milliseconds from WANT to usable, and of the phases."""
        key = RequestKey(ROUTER, name, 0)
        self.until(lambda: key in self.ready)
        count = self.ready[key]
        mine = table(f"d{name}", count // BLOCK, self.num_blocks)
        known = hashes(name, len(mine))  # a request has them before its KV comes
        before = [self._sum(phase) for phase in PHASES]
        counted = self._sum("load", "count")
        started = time.perf_counter()
        self.service.begin_load(key, (tuple(mine),), 0, count, known)
        self.until(lambda: key in self.ended)
        seconds = time.perf_counter() - started
        self.until(lambda: self._sum("load", "count") > counted)  # behind the engine's word
        phases = [self._sum(phase) - was for phase, was in zip(PHASES, before, strict=True)]
        theirs = torch.tensor(table(name, count // BLOCK, self.num_blocks), dtype=torch.int32)
        seen = self.kv_cache.view(torch.int32)[mine]
        wanted = (theirs + 1).to(seen.device)[:, None]
        right = bool((seen == wanted).all())
        assert right, "other bytes came"
        return "ok " + " ".join(f"{each * 1e3:.4f}" for each in (seconds, *phases))

    def _sum(self, phase: str, what: str = "sum") -> float:
        name = f"tandem:kv_handoff_phase_seconds_{what}"
        return self.registry.get_sample_value(name, {"phase": phase}) or 0.0

    def commands(self) -> dict[str, Callable[..., str]]:
        """Return the commands by their first word."""
        names = ("export", "released", "meet", "open", "load")
        return {name: getattr(self, name) for name in names}

    def serve(self) -> None:
        """Until the input ends."""
        commands = self.commands()
        where = getattr(self.service, "control", "-")
        print(f"ok {where} {self.me.hex()}", flush=True)
        for line in sys.stdin:
            name, *words = line.split()
            try:
                print(commands[name](*words), flush=True)
            except Exception as error:
                print(f"failed {error!r}", flush=True)
        self.service.close()


class Child:
    """A worker in a process of its own."""

    def __init__(
        self,
        role: str,
        gpu: int,
        asked: argparse.Namespace,
        connector: str,
        program: Sequence[str],
    ) -> None:
        words = [sys.executable, *program, "--role", role, "--connectors", connector]
        words += ["--device", asked.device, "--blocks", str(asked.blocks), "--folder", asked.folder]
        words += ["--gpu", str(gpu)]
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _, self.control, self.incarnation = self.answer()

    def tell(self, line: str) -> list[str]:
        """Say a line, get the words of the answer."""
        self.say(line)
        return self.answer()

    def say(self, line: str) -> None:
        """Say a line whose answer is asked for later."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self) -> list[str]:
        """Words of the next line that is one."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ok"):
                return line.split()
            raise RuntimeError(line)
        raise RuntimeError("the worker has ended")

    def end(self) -> None:
        """End its input, wait for it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def pair(
    asked: argparse.Namespace,
    connector: str,
    program: Sequence[str] = (__file__,),
    gpus: Sequence[int] = (0, 1),
) -> Iterator[tuple[Child, Child]]:
    """A producer and a consumer, linked; of ``program``."""
    producer = Child("producer", gpus[0], asked, connector, program)
    consumer = Child("consumer", gpus[1], asked, connector, program)
    try:
        consumer.tell(f"meet {producer.control} {producer.incarnation}")
        yield producer, consumer
    finally:
        consumer.end()
        producer.end()


def measured(asked: argparse.Namespace, connector: str) -> dict[str, dict[str, float]]:
    """Medians of each length."""
    found: dict[str, dict[str, float]] = {}
    with pair(asked, connector, gpus=asked.gpus) as (producer, consumer):
        for length in LENGTHS:
            tokens, times = length // asked.scale // BLOCK * BLOCK, []
            for turn in range(asked.rounds + 2):
                name = f"{length}-{turn}"
                consumer.tell(f"open {name} {producer.incarnation}")
                producer.tell(f"export {name} {tokens} {consumer.incarnation}")
                times.append([float(each) for each in consumer.tell(f"load {name}")[1:]])
                producer.tell(f"released {name}")
            nbytes = tokens // BLOCK * LAYOUT.block_bytes
            columns = list(zip(*times[2:], strict=True))
            middle = [statistics.median(each) for each in columns]
            found[str(tokens)] = {
                "gb": nbytes / 1e9,
                "want_to_usable_ms": middle[0],
                "gb_per_s": nbytes / middle[0] / 1e6,
                "gb_per_s_best": nbytes / min(columns[0]) / 1e6,
                **{f"{name}_ms": ms for name, ms in zip(PHASES, middle[1:], strict=True)},
            }
    return found


def main() -> None:
    """Print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--connectors", default="cuda_p2p,nixl")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--scale", type=int, default=1, help="divide the lengths")
    parser.add_argument("--blocks", type=int, default=1024, help="of each end")
    parser.add_argument("--gpus", type=int, nargs=2, default=(0, 1), help="0 0: one for both")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--gpu", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.role:
        Worker(asked.role, asked).serve()
        return
    found: dict[str, Any] = {}
    if asked.device == "cuda":
        found["gpus"] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = folder
        for connector in asked.connectors.split(","):
            found[connector] = measured(asked, connector)
            for tokens, row in found[connector].items():
                shown = {name: round(value, 3) for name, value in row.items()}
                print(connector, tokens, shown, flush=True)
    (asked.out / "fabric.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
