"""Workers for the tests of the hand-off: a producer and a consumer over small real slabs.

Engines are scripted: they compute known bytes into known blocks and poll as a step loop would.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from tests.kvtransfer.memory_transport import kv_config, transports_of
from tests.waiting import SECONDS, Deadline

from tandem.kvtransfer import events
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.memory.device import MappedAllocator
from tandem.memory.shared import shared_tensor
from tandem.protocol.card import Fingerprint, KVGroup, KVLayout, blocks_for
from tandem.protocol.ids import Incarnation, RequestKey, new_incarnation
from tandem.protocol.kv import BlockTables, FirstToken

BLOCK = 4
"""Tokens a block."""
LAYOUT = KVLayout(
    (KVGroup(num_layers=2, num_kv_heads=2, head_dim=16, block_size=BLOCK, dtype="float32"),)
)
NUM_BLOCKS = 64
GPU_RANGE = 256 << 20
ROUTER = b"R" * 16
FOLDER_VARIABLE = "TEST_KV_NODE_FOLDER"


def fingerprint_of(layout: KVLayout, dtype: str = "float32") -> Fingerprint:
    return Fingerprint(revision="test", dtype=dtype, layout=layout)


FINGERPRINT = fingerprint_of(LAYOUT)


def make_config(**changes: object) -> KVTransferConfig:
    """Small slots, quick beats, any port; the folder that a parent process names."""
    fields: dict[str, object] = {
        "kv_connector": "tcp",
        "kv_slot_bytes": 4096,
        "kv_control_port": 0,
        "kv_beat_seconds": 0.1,
        "kv_beat_timeout": 1.0,
        "kv_probe_bytes": 4096,
        "kv_node_folder": os.environ.get(FOLDER_VARIABLE),
        **changes,
    }
    return kv_config(**fields)  # type: ignore[arg-type]


def config_apart(**changes: object) -> KVTransferConfig:
    """The same for ends in two processes, of which each waits for its own turns: a second in which
    one had none, and the other many, is no loss."""
    return make_config(**{"kv_beat_timeout": 2.5, **changes})


def only(blocks: Iterable[int]) -> BlockTables:
    """The tables of a layout with one group."""
    return (tuple(blocks),)


def make_key(name: str, attempt: int = 0) -> RequestKey:
    return RequestKey(ROUTER, name, attempt)


def kv_of(name: str, num_tokens: int) -> torch.Tensor:
    """uint8 [blocks, block_bytes]: what a right hand-off of that request delivers."""
    generator = torch.Generator().manual_seed(abs(hash_of(name)))
    shape = (blocks_for(num_tokens, BLOCK), LAYOUT.block_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode().ljust(8, b".")[:8], "little") >> 1


def slab_for(config: KVTransferConfig, layout: KVLayout = LAYOUT) -> torch.Tensor:
    """uint8 [NUM_BLOCKS, block_bytes], all zero, that other processes can map; on a GPU at the
    start of a range that is large enough to be missed."""
    size = NUM_BLOCKS * layout.block_bytes
    if config.kv_connector in ("cuda_p2p", "cuda_p2p_agent"):
        memory = MappedAllocator(torch.device("cuda"))(GPU_RANGE)[:size].zero_()
    else:
        memory = shared_tensor(size)
    return memory.view(NUM_BLOCKS, -1)


class Switch:
    """A fence that a test closes by hand."""

    def __init__(self, done: bool = False) -> None:
        self.is_done = done

    def done(self) -> bool:
        return self.is_done


class _Worker:
    def __init__(
        self, config: KVTransferConfig, transports: Mapping[str, Any], layout: KVLayout
    ) -> None:
        # One that a test made has a name of its own, by which peers know it.
        named = [each.incarnation for each in transports.values() if hasattr(each, "incarnation")]
        self.incarnation: Incarnation = named[0] if named else new_incarnation()
        self.registry = CollectorRegistry()
        self.config = config
        self.kv_cache = slab_for(config, layout)
        self.woken = threading.Event()
        self.seen: list[Any] = []

    def metric(self, name: str, **labels: str) -> float:
        """A sample's value, 0 if it is not there."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def collect(self) -> None:
        raise NotImplementedError

    def until(self, told: Callable[[], object], seconds: float = SECONDS) -> object:
        """Poll like a step loop until ``told`` is true; fail at the deadline."""
        deadline = Deadline(seconds, every=0.05)
        while True:
            self.woken.clear()
            self.collect()
            found = told()
            if found:
                return found
            deadline.check(lambda: self.seen)
            self.woken.wait(0.05)

    def wait_for(
        self,
        kind: type[Any] | tuple[type[Any], ...],
        key: RequestKey | None = None,
        seconds: float = SECONDS,
    ):
        """The first event of this kind, or of one of them (and key)."""

        def found() -> object:
            return next(
                (e for e in self.seen if isinstance(e, kind) and key in (None, e.key)), None
            )

        return self.until(found, seconds)


class Producer(_Worker):
    """A prefill worker whose engine is the test."""

    def __init__(self, config: KVTransferConfig | None = None, **more) -> None:
        layout = more.pop("layout", LAYOUT)
        config = config or make_config()
        more["transports"] = more.get("transports") or transports_of(config)
        super().__init__(config, more["transports"] or {}, layout)
        self.service = HandoffProducer(
            self.config,
            kv_cache=self.kv_cache,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            fingerprint=more.pop("fingerprint", None) or fingerprint_of(layout),
            incarnation=self.incarnation,
            registry=self.registry,
            notify=self.woken.set,
            **more,
        )
        self.service.start()

    def collect(self) -> None:
        self.seen += self.service.poll()

    def admit(self, key: RequestKey, num_tokens: int, consumer: Incarnation, budget_ms=10_000):
        return self.service.admit(
            key,
            num_tokens=num_tokens,
            consumer=consumer,
            budget_ms=budget_ms,
        )

    def compute(self, key: RequestKey, num_tokens: int, blocks: list[int], chunk: int = 8) -> None:
        """Write the KV chunk by chunk and announce each."""
        kv = kv_of(key.request, num_tokens)
        for stop in [*range(chunk, num_tokens, chunk), num_tokens]:
            used = blocks[: blocks_for(stop, BLOCK)]
            self.kv_cache[used] = kv[: len(used)]
            self.service.computed(key, only(used), stop, Switch(done=True))

    def end(self, key: RequestKey, finish: str | None = None) -> None:
        self.service.final(key, [FirstToken(0, 42)], finish)
        self.service.finished(key)

    def hand_over(self, key: RequestKey, num_tokens: int, blocks: list[int], consumer) -> None:
        assert self.admit(key, num_tokens, consumer) is None
        self.compute(key, num_tokens, blocks)
        self.end(key)


class Consumer(_Worker):
    """A decode worker whose engine is the test."""

    def __init__(self, config: KVTransferConfig | None = None, **more) -> None:
        layout = more.pop("layout", LAYOUT)
        config = config or make_config()
        more["transports"] = more.get("transports") or transports_of(config)
        super().__init__(config, more["transports"] or {}, layout)
        self.service = HandoffConsumer(
            self.config,
            kv_cache=self.kv_cache,
            layout=layout,
            num_blocks=NUM_BLOCKS,
            fingerprint=more.pop("fingerprint", None) or fingerprint_of(layout),
            incarnation=self.incarnation,
            registry=self.registry,
            notify=more.pop("notify", self.woken.set),
            **more,
        )
        self.service.start()

    def collect(self) -> None:
        self.seen += self.service.poll()

    def meet(self, producer: Producer, seconds: float = SECONDS) -> None:
        """Link to it, and wait until the probe has passed."""
        self.service.set_peers({producer.service.control: producer.incarnation})
        self.until(lambda: self.service.peer_up(producer.incarnation), seconds)

    def open(self, key: RequestKey, producer: Incarnation, budget_ms: int | None = 10_000) -> None:
        self.service.open(key, producer, budget_ms=budget_ms)

    def load(self, key: RequestKey, blocks: list[int], hit: int = 0) -> None:
        ready = self.wait_for(events.Ready, key)
        self.service.begin_load(key, only(blocks), hit, ready.num_tokens)

    def holds(self, name: str, num_tokens: int, blocks: list[int]) -> bool:
        return bool(torch.equal(self.kv_cache[blocks].cpu(), kv_of(name, num_tokens)))
