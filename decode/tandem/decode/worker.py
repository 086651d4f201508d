"""Entry of the decode worker: settings in, exit status out. An encoder hands nothing over."""

from __future__ import annotations

from tandem.decode.connector import DecodeConnector
from tandem.engine.config import EngineConfig
from tandem.engine.executor.factory import make_executor
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.memory.allocator import slab_allocator
from tandem.kvtransfer.service.consumer import HandoffConsumer
from tandem.protocol.card import WorkerRole
from tandem.worker.handoff import NoHandoff
from tandem.worker.launch import RoleContext, RoleParts, run_worker
from tandem.worker.server_config import ServerConfig


def run(config: EngineConfig, server: ServerConfig, kv: KVTransferConfig) -> int:
    """Serve until a signal."""
    takes_over = config.facts.encoder is None
    executor = make_executor(config, reach_memory=takes_over)

    def make_role(context: RoleContext) -> RoleParts:
        if not takes_over:
            return RoleParts(NoHandoff(), None)
        (region,) = context.executor.regions()
        consumer = HandoffConsumer(
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
        consumer.start()
        return RoleParts(consumer, DecodeConnector(consumer))

    return run_worker(
        config,
        server,
        WorkerRole.DECODE,
        executor=executor,
        make_role=make_role,
        allocate=slab_allocator(kv, on_gpu=config.device != "cpu"),
    )
