"""Entry of the prefill worker: settings in, exit status out. An encoder hands nothing over."""

from __future__ import annotations

from tandem.engine.config import EngineConfig
from tandem.engine.executor.factory import make_executor
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.allocator import slab_allocator
from tandem.kvtransfer.service.producer import HandoffProducer
from tandem.prefill.config import PrefillConfig, chunked
from tandem.prefill.connector import PrefillConnector
from tandem.protocol.card import WorkerRole
from tandem.worker.handoff import NoHandoff
from tandem.worker.launch import RoleContext, RoleParts, run_worker
from tandem.worker.server_config import ServerConfig


def run(
    config: EngineConfig, server: ServerConfig, kv: KVTransferConfig, prefill: PrefillConfig
) -> int:
    """Serve until a signal."""
    hands_over = config.facts.encoder is None
    executor = make_executor(config, reach_memory=hands_over)

    def make_role(context: RoleContext) -> RoleParts:
        if not hands_over:
            return RoleParts(NoHandoff(), None)
        (region,) = context.executor.regions()
        producer = HandoffProducer(
            kv,
            slab=region.blocks,
            layout=context.capacity.layout,
            num_blocks=context.capacity.num_blocks,
            fingerprint=context.fingerprint,
            incarnation=context.incarnation,
            registry=context.registry,
            notify=context.notify,
            guard=context.guard,
        )
        producer.start()
        block_size = context.capacity.layout.block_size
        return RoleParts(
            producer,
            PrefillConnector(producer, block_size),
            producer.control,
            producer.max_blocks * block_size,
        )

    return run_worker(
        chunked(config, prefill, kv),
        server,
        WorkerRole.PREFILL,
        executor=executor,
        make_role=make_role,
        allocate=slab_allocator(kv, on_gpu=config.device != "cpu"),
    )
