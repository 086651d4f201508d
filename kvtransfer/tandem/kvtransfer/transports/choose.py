"""Transports of the configured connector, best first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from tandem.base.listening import is_loopback
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
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
    """Return the transports of ``kv_connector`` by name, in order of preference.

    ``auto`` is nixl and then tcp, so that ends of which only one can load nixl still meet;
    without nixl a warning is logged. A connector asked for by name that cannot load raises
    TransportError. With ``kv_node_folder``, ``auto`` first tries cuda_p2p or shm for each link,
    then the node's agent, then nixl or tcp; ``kv_node_copy`` may leave one of the first two out.
    A link whose other end lacks a way uses the next. There cuda_p2p and shm by name are the
    first two ways, and a link that has neither is down. With ``on_gpu``, the KV cache is in a GPU's
    memory: nixl reaches slots there. tcp needs them on the host, and is used only if nixl cannot
    load.
    """

    make = _Maker(config, incarnation, role, on_gpu, on_garbage)
    if config.kv_connector != "auto":
        names = tuple(_of_this_node(config, config.kv_connector)) or (config.kv_connector,)
        return {name: make(name) for name in names}
    found = {name: make(name) for name in _of_this_node(config, "cuda_p2p" if on_gpu else "shm")}
    try:
        best = make("nixl")
        return {**found, "nixl": best} if on_gpu else {**found, "nixl": best, "tcp": make("tcp")}
    except TransportError as error:
        logger.warning("KV goes over plain TCP, which is slower: %s", error)
        return {**found, "tcp": make("tcp")}


def _of_this_node(config: KVTransferConfig, name: str) -> Iterator[str]:
    """Yield the ways to copy between workers that meet in a named folder, best first; ``name``
    is the way without the agent. Empty without a folder, or for other connectors."""
    if config.kv_node_folder is None or name not in ("cuda_p2p", "shm"):
        return
    if config.kv_wire_dtype != WireDtype.AUTO:
        said = "KV goes through slots, not by mapped memory: kv_wire_dtype is %s"
        logger.info(said, config.kv_wire_dtype)
        return
    if config.kv_node_copy != "agent":
        yield name
    if config.kv_node_copy != "direct":
        yield f"{name}_agent"


class _Maker(NamedTuple):
    """Makes a transport by its name."""

    config: KVTransferConfig
    incarnation: Incarnation
    role: str
    on_gpu: bool
    on_garbage: Callable[[], None]

    def __call__(self, name: str) -> Transport:
        """Raises TransportError if it cannot load."""
        if name == "nixl":
            loopback = is_loopback(self.config.kv_control_host)
            return NixlTransport(self.incarnation, self.role, on_gpu=self.on_gpu, loopback=loopback)
        return self._tcp() if name == "tcp" else self._of_memory(name)

    def _tcp(self) -> Transport:
        config = self.config
        return TcpTransport(
            self.incarnation,
            host=config.kv_control_host,
            first_port=config.kv_data_port,
            num_ports=config.kv_data_ports,
            streams=config.kv_tcp_streams or (4 if self.on_gpu else 2),
            on_garbage=self.on_garbage,
        )

    def _of_memory(self, name: str) -> Transport:
        from tandem.kvtransfer.transports.agent.choose import make_agent
        from tandem.kvtransfer.transports.mapped.choose import make_mapped

        if name in ("cuda_p2p_agent", "shm_agent"):
            return make_agent(name, self.incarnation, self.config, on_gpu=self.on_gpu)
        return make_mapped(
            name,
            self.incarnation,
            self.config.kv_node_folder,
            on_gpu=self.on_gpu,
            on_garbage=self.on_garbage,
        )
