"""From the word in the configuration to transports, best first."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.memory import MemoryTransport
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.exposure import is_loopback
from tandem.protocol.ids import Incarnation

logger = logging.getLogger(__name__)


def make_transports(
    config: KVTransferConfig,
    incarnation: Incarnation,
    role: str,
    *,
    on_gpu: bool = False,
    on_garbage: Callable[[], None] = lambda: None,
) -> dict[str, Transport]:
    """What ``kv_connector`` asks for, by name, in order of preference.

    ``auto`` is nixl with tcp behind it, so that ends of which only one can load nixl still meet;
    without nixl a warning is logged. A connector asked for by name that cannot load raises
    TransportError. Where ``kv_node_folder`` names a place to meet, ``auto`` tries cuda_p2p or shm
    before them for each link; one whose other end is not there goes by the next. With ``on_gpu``,
    the slab is in a GPU's memory: nixl reaches slots there, and tcp, which needs them on the host,
    only stands in where nixl cannot load.
    """

    def tcp() -> Transport:
        return TcpTransport(
            incarnation,
            host=config.kv_control_host,
            first_port=config.kv_data_port,
            num_ports=config.kv_data_ports,
            streams=config.kv_tcp_streams or (4 if on_gpu else 2),
            on_garbage=on_garbage,
        )

    def nixl() -> NixlTransport:
        loopback = is_loopback(config.kv_control_host)
        return NixlTransport(incarnation, role, on_gpu=on_gpu, loopback=loopback)

    def mapped(name: str) -> Transport:
        from tandem.kvtransfer.transports.mapped.choose import make_mapped

        return make_mapped(
            name, incarnation, config.kv_node_folder, on_gpu=on_gpu, on_garbage=on_garbage
        )

    if config.kv_connector == "memory":
        return {"memory": MemoryTransport()}
    if config.kv_connector == "memory_blocks":
        return {"memory_blocks": MemoryTransport(direct=True)}
    if config.kv_connector in ("cuda_p2p", "shm"):
        return {config.kv_connector: mapped(config.kv_connector)}
    if config.kv_connector == "tcp":
        return {"tcp": tcp()}
    if config.kv_connector == "nixl":
        return {"nixl": nixl()}
    found: dict[str, Transport] = {}
    if config.kv_node_folder is not None:
        name = "cuda_p2p" if on_gpu else "shm"
        found[name] = mapped(name)
    try:
        best = nixl()
        return {**found, "nixl": best} if on_gpu else {**found, "nixl": best, "tcp": tcp()}
    except TransportError as error:
        logger.warning("KV goes over plain TCP, which is slower: %s", error)
        return {**found, "tcp": tcp()}
