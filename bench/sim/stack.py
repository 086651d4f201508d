"""A router over workers, as ``tandem up`` would make them, on one clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.sim.clock import Clock
from bench.sim.link import Link
from bench.sim.router import SimRouter
from bench.sim.times import QWEN3_8B, Device, Way
from bench.sim.worker import SimWorker

from tandem.engine.config import EngineConfig
from tandem.kvtransfer.config import KVTransferConfig
from tandem.prefill.config import PrefillConfig, chunked
from tandem.protocol.card import WorkerRole
from tandem.router.config import RouterConfig

CONTEXT = 32_768
MAX_ITL_MS = 21.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Which workers there are, how they mix prompts with decodes, and how requests are placed."""

    prefill: int
    decode: int
    strict: bool = False
    max_itl_ms: float | None = None
    """Of decode workers; None is the default bound by tokens."""
    prefill_max_itl_ms: float | None = None


SHAPES = {
    "1P1D strict": Shape(1, 1, strict=True),
    "two aggregated": Shape(0, 2),
    "two aggregated bounded": Shape(0, 2, max_itl_ms=MAX_ITL_MS),
    "1P1D unbounded": Shape(1, 1),
    "1P1D": Shape(1, 1, max_itl_ms=MAX_ITL_MS, prefill_max_itl_ms=MAX_ITL_MS),
}


class Stack:
    """Everything of one run."""

    def __init__(
        self,
        shape: Shape,
        *,
        seed: int = 0,
        device: Device | None = None,
        way: Way | None = None,
        **engine: Any,
    ) -> None:
        """``engine`` are settings of every worker's engine, ``seed`` is of steps' times."""
        self.clock = Clock()
        self.way = way or Way()
        device = device or Device()
        flat = {"revision": "sim", "max_model_len": CONTEXT, **engine}
        config = EngineConfig.of("sim", facts=QWEN3_8B, device="cuda", **flat)
        kv = KVTransferConfig(kv_connector="cuda_p2p", kv_node_folder="sim")
        cut = chunked(config, PrefillConfig(), kv)
        configs = {WorkerRole.PREFILL: cut, WorkerRole.DECODE: config}
        bounds = {
            WorkerRole.PREFILL: shape.prefill_max_itl_ms,
            WorkerRole.DECODE: shape.max_itl_ms,
        }
        roles = [WorkerRole.PREFILL] * shape.prefill + [WorkerRole.DECODE] * shape.decode
        self.workers = [
            SimWorker(
                self.clock,
                self.way,
                configs[role].with_(max_itl_ms=bounds[role]),
                device,
                role,
                number + 1,
                1000 * seed,
            )
            for number, role in enumerate(roles)
        ]
        self.links = self._join(config)
        policy = RouterConfig(strict_handoff=shape.strict).placement_policy()
        self.router = SimRouter(self.clock, self.way, self.workers, policy)

    def _join(self, config: EngineConfig) -> list[Link]:
        layout, links = config.layout, []
        for producer in self.workers:
            for consumer in self.workers:
                if producer.view.role is consumer.view.role or (
                    producer.view.role is not WorkerRole.PREFILL
                ):
                    continue
                link = Link(self.clock, self.way, layout.block_bytes, layout.block_size)
                link.producing, link.consuming = producer.producing, consumer.consuming
                producer.producing.links[consumer.incarnation] = link
                consumer.consuming.links[producer.incarnation] = link
                links.append(link)
        return links
