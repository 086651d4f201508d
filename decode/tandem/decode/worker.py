"""Entry of the decode worker."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.executor.factory import make_executor
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.card import WorkerRole
from tandem.worker.connectors.consumer import DecodeConnector
from tandem.worker.connectors.role import (
    Ends,
    kv_cache_allocator,
    lending_only,
    make_consumer,
    make_producer,
    with_pulls,
)
from tandem.worker.handoff import NoHandoff
from tandem.worker.launch import RoleContext, RoleParts, run_worker
from tandem.worker.server_config import ServerConfig


def run(config: EngineConfig, server: ServerConfig, kv: KVTransferConfig) -> int:
    """Serve until a signal; return the exit status. An encoder and several ranks get no
    hand-off."""
    alone = config.parallel.tensor_parallel_size > 1 and not kv.kv_pull_peers
    takes_over = config.facts.encoder is None and not alone
    executor = make_executor(config, reach_memory=takes_over)

    def make_role(context: RoleContext) -> RoleParts:
        if not takes_over:
            return RoleParts(NoHandoff(), None)
        consumer = make_consumer(context, kv)
        if not kv.kv_pull_peers:
            return RoleParts(consumer, DecodeConnector(consumer))
        ends = Ends.of(make_producer(context, lending_only(kv)), consumer)
        own = DecodeConnector(consumer, poll=ends.taken.of_handoffs)
        return with_pulls(context, kv, ends, own, lends_only=True)

    return run_worker(
        config,
        server,
        WorkerRole.DECODE,
        executor=executor,
        make_role=make_role,
        allocate=kv_cache_allocator(kv, on_gpu=config.device != "cpu"),
    )
