"""Entry of the prefill worker."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.executor.factory import make_executor
from tandem.kvtransfer.config import KVTransferConfig
from tandem.prefill.config import PrefillConfig, chunked
from tandem.protocol.card import WorkerRole
from tandem.worker.connectors.producer import PrefillConnector
from tandem.worker.connectors.role import (
    Ends,
    kv_cache_allocator,
    make_consumer,
    make_producer,
    with_pulls,
)
from tandem.worker.handoff import NoHandoff
from tandem.worker.launch import RoleContext, RoleParts, run_worker
from tandem.worker.server_config import ServerConfig


def run(
    config: EngineConfig, server: ServerConfig, kv: KVTransferConfig, prefill: PrefillConfig
) -> int:
    """Serve until a signal; return the exit status. An encoder gets no hand-off."""
    hands_over = config.facts.encoder is None
    executor = make_executor(config, reach_memory=hands_over)

    def make_role(context: RoleContext) -> RoleParts:
        if not hands_over:
            return RoleParts(NoHandoff(), None)
        producer = make_producer(context, kv)
        size = context.capacity.layout.block_size
        if not kv.kv_pull_peers:
            own = PrefillConnector(producer, size)
            return RoleParts(producer, own, producer.control, producer.max_tokens)
        ends = Ends.of(producer, make_consumer(context, kv))
        own = PrefillConnector(producer, size, poll=ends.given.of_handoffs)
        return with_pulls(context, kv, ends, own, lends_only=False)

    return run_worker(
        chunked(config, prefill, kv),
        server,
        WorkerRole.PREFILL,
        executor=executor,
        make_role=make_role,
        allocate=kv_cache_allocator(kv, on_gpu=config.device != "cpu"),
    )
