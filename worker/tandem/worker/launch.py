"""Start of a worker, the same steps for both roles: probes, weights, connector, routers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from msgspec.structs import replace
from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tandem.engine.config import EngineConfig
from tandem.engine.core.engine_core import EngineCore
from tandem.engine.executor.base import Executor
from tandem.engine.kv_memory import Capacity, KVCacheAllocator
from tandem.engine.metrics import EngineMetrics
from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.engine.stat_loggers import stat_loggers_of
from tandem.link.curve import CurveGuard
from tandem.link.naps import switch_soon
from tandem.link.sockets import raise_descriptor_limit, roomy
from tandem.protocol.card import Fingerprint, WorkerRole
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.keys import KeyRing
from tandem.tracing.spans import Spans
from tandem.worker.engine_proc import EngineCoreProc
from tandem.worker.handoff import HandoffService
from tandem.worker.io import Inbox
from tandem.worker.server_config import ServerConfig
from tandem.worker.worker_probes import WorkerProbes

_UTIME, _STIME, _RSS = 11, 12, 21
"""Indices in /proc/PID/stat after the command's name, from 0: proc(5)."""

Pids = Callable[[], Mapping[int, int]]


def show_rank_processes(registry: CollectorRegistry, pids: Pids) -> None:
    """Register CPU and memory metrics of ranks with a process of their own."""
    registry.register(
        RankSeries(
            "tandem:rank_process_resident_memory_bytes",
            "Memory of a rank's own process.",
            "gauge",
            pids,
            lambda fields: float(fields[_RSS]) * os.sysconf("SC_PAGE_SIZE"),
        )
    )
    registry.register(
        RankSeries(
            "tandem:rank_process_cpu_seconds",
            "CPU time of a rank's own process.",
            "counter",
            pids,
            _cpu_seconds,
        )
    )


class RankSeries(Collector):
    """One metric of these processes."""

    labels = ("rank",)

    def __init__(
        self, name: str, text: str, kind: str, pids: Pids, read: Callable[[list[str]], float]
    ) -> None:
        """``read`` takes the fields of a process's stat; ``kind`` is gauge or counter."""
        self.name = name
        self.documentation = text
        self.kind = kind
        self._pids = pids
        self._read = read

    def collect(self) -> Iterable[Metric]:
        made = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = made(self.name, self.documentation, labels=self.labels)
        for rank, pid in sorted(self._pids().items()):
            fields = _stat(pid)
            if fields is not None:
                family.add_metric((str(rank),), self._read(fields))
        yield family


def _cpu_seconds(fields: list[str]) -> float:
    ticks = float(fields[_UTIME]) + float(fields[_STIME])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleContext:
    """Inputs from which a role makes its connector."""

    config: EngineConfig
    capacity: Capacity
    fingerprint: Fingerprint
    incarnation: Incarnation
    executor: Executor
    registry: CollectorRegistry
    guard: CurveGuard | None
    """Guard of the role's own sockets against unknown keys."""
    notify: Callable[[], None]
    """Function that wakes the step loop, from any thread."""


@dataclass(frozen=True, slots=True)
class RoleParts:
    """Parts that a role makes from its RoleContext."""

    handoff: HandoffService
    connector: KVConnector | None
    control: str | None = None
    """Endpoint of this worker's control socket for peers."""
    max_handoff_tokens: int | None = None
    """Tokens of the longest prompt that the worker hands over."""
    pull_peers: int = 0
    """Number of workers to which it keeps links for pulls of cached prefixes."""
    lend_from: Callable[[CachedPrefixes], None] | None = None
    """Function that gets the engine's cache, if the role lends from it."""


MakeRole = Callable[[RoleContext], RoleParts]


def run_worker(
    config: EngineConfig,
    server: ServerConfig,
    kind: WorkerRole,
    *,
    executor: Executor,
    make_role: MakeRole,
    allocate: KVCacheAllocator | None = None,
) -> int:
    """Serve until a signal; return the exit status. ``allocate`` gives the KV cache's memory if a
    transport shares it. Raises TandemError."""
    raise_descriptor_limit()
    switch_soon()
    # Before the first socket: links take three sockets each.
    roomy(zmq.Context.instance())
    registry = CollectorRegistry()
    for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
        registry.register(collector)
    probes = WorkerProbes(server, registry)
    incarnation = new_incarnation()
    inbox = Inbox()
    ring = KeyRing.load(server.curve_keys, server.curve_peers)
    guard = CurveGuard(ring) if ring is not None else None
    if ring is not None and guard is not None:
        probes.tell_keys(ring.names)
        guard.start()
    parts: list[RoleParts] = []

    def connect(capacity: Capacity) -> KVConnector | None:
        fingerprint = config.fingerprint(capacity.layout)
        parts.append(
            make_role(
                RoleContext(
                    config=config,
                    capacity=capacity,
                    fingerprint=fingerprint,
                    incarnation=incarnation,
                    executor=executor,
                    registry=registry,
                    guard=guard,
                    notify=lambda: inbox.put(None),
                )
            )
        )
        return parts[0].connector

    metrics = EngineMetrics(
        registry, model_name=config.served_model_name, max_model_len=config.max_model_len
    )
    core = EngineCore.launch(
        config,
        executor,
        allocate=allocate,
        connect=connect,
        metrics=metrics,
        stat_loggers=stat_loggers_of(log_interval=server.log_stats_interval),
    )
    if parts[0].lend_from is not None:
        parts[0].lend_from(CachedPrefixes(core.scheduler, closed=lambda: core.takes_nothing))
    spans = None
    if server.otlp_traces_endpoint is not None:
        name = f"tandem-{kind.value}"
        spans = Spans(server, name, incarnation.hex()[:8])
    show_rank_processes(registry, executor.processes)
    proc = EngineCoreProc(
        core=core,
        handoff=parts[0].handoff,
        card=replace(
            core.card(
                role=kind,
                incarnation=incarnation,
                control=parts[0].control,
                max_handoff_tokens=parts[0].max_handoff_tokens,
            ),
            pull_peers=parts[0].pull_peers,
        ),
        server=server,
        probes=probes,
        inbox=inbox,
        registry=registry,
        guard=guard,
        spans=spans,
    )
    logger.info(
        "%s worker %s serves %s: %d blocks of %d tokens",
        kind.value,
        incarnation.hex()[:8],
        config.served_model_name,
        core.manager.pool.num_blocks,
        core.manager.block_size,
    )
    try:
        return proc.run()
    finally:
        if guard is not None:
            guard.stop()
