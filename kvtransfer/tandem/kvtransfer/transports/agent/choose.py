"""``cuda_p2p_agent`` or ``shm_agent``, by name, for a KV cache that they can reach."""

from __future__ import annotations

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.agent.line import agent_folder
from tandem.kvtransfer.transports.agent.sizes import LandingSizes
from tandem.kvtransfer.transports.agent.transport import AgentTransport
from tandem.kvtransfer.transports.mapped.choose import make_copier
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.protocol.ids import Incarnation


def make_agent(
    name: str, incarnation: Incarnation, config: KVTransferConfig, *, on_gpu: bool
) -> AgentTransport:
    """Return the transport ``name``. Raises TransportError if it cannot reach the KV cache."""
    if on_gpu != (name == "cuda_p2p_agent"):
        where, allowed = ("a GPU", "cuda_p2p_agent") if on_gpu else ("the host", "shm_agent")
        raise TransportError(f"kv_connector: {name}, with KV in memory of {where}: try {allowed}")
    place = agent_folder(open_folder(config.kv_node_folder))
    sizes = LandingSizes(config, on_gpu=on_gpu)
    return AgentTransport(name, incarnation, make_copier(on_gpu), place, sizes, on_gpu=on_gpu)
