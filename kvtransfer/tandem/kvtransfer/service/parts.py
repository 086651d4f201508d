"""Shared parts of both services, and checks of their arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tandem.base.listening import is_loopback
from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.handoff.form import WireDtype
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.nixl import NixlTransport
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.protocol.card import DTYPE_BYTES, Fingerprint, KVLayout
from tandem.protocol.errors import InvalidParameter
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
    """Return the transports of ``kv_connector`` by name, in order of preference. Both ends of a
    link use the first one that they share.

    ``auto`` is nixl, then tcp. With ``kv_node_folder`` cuda_p2p or shm and the node's agent come
    first; ``kv_node_copy`` may exclude one. With ``on_gpu`` tcp is used only if nixl cannot load,
    because tcp needs slots on the host. Raises TransportError if the connector that the flag names
    cannot load.
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
    """Yield the transports between workers that meet in a folder, best first; ``name`` is the one
    without the agent. Empty without a folder, or for other connectors."""
    if config.kv_node_folder is None or name not in ("cuda_p2p", "shm"):
        return
    if config.kv_wire_dtype != WireDtype.AUTO:
        text = "KV goes through slots, not by mapped memory: kv_wire_dtype is %s"
        logger.info(text, config.kv_wire_dtype)
        return
    if config.kv_node_copy != "agent":
        yield name
    if config.kv_node_copy != "direct":
        yield f"{name}_agent"


class _Maker(NamedTuple):
    """Maker of a transport by its name."""

    config: KVTransferConfig
    incarnation: Incarnation
    role: str
    on_gpu: bool
    on_garbage: Callable[[], None]

    def __call__(self, name: str) -> Transport:
        """Raise TransportError if it cannot load."""
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
        from tandem.kvtransfer.transports.agent.transport import make_agent
        from tandem.kvtransfer.transports.mapped.transport import make_mapped

        if name in ("cuda_p2p_agent", "shm_agent"):
            return make_agent(name, self.incarnation, self.config, on_gpu=self.on_gpu)
        return make_mapped(
            name,
            self.incarnation,
            self.config.kv_node_folder,
            on_gpu=self.on_gpu,
            on_garbage=self.on_garbage,
        )


def as_bytes(kv_cache: Tensor, num_blocks: int, layout: KVLayout) -> Tensor:
    """Return the KV cache as uint8 [num_blocks, block_bytes], sharing its memory. Raises
    InvalidParameter if it is not dense or of another size."""
    flat = kv_cache.view(-1).view(torch.uint8) if kv_cache.is_contiguous() else None
    wanted = num_blocks * layout.block_bytes
    if flat is None or flat.numel() != wanted:
        size = kv_cache.numel() * kv_cache.element_size()
        raise InvalidParameter(
            "kv_cache", f"{size} bytes", f"{wanted} dense bytes: {num_blocks} blocks of the layout"
        )
    return flat.view(num_blocks, layout.block_bytes)


def make_parts(
    config: KVTransferConfig,
    role: str,
    *,
    kv_cache: Tensor,
    layout: KVLayout,
    num_blocks: int,
    fingerprint: Fingerprint,
    incarnation: Incarnation,
    registry: CollectorRegistry,
    notify: Callable[[], None],
    transports: dict[str, Transport] | None,
    kv_scales: Sequence[Sequence[float]] | None = None,
) -> MoverParts:
    """Choose the transports and make the shared parts. ``kv_scales`` has a scale of codes for each
    of a group's ``num_rows``; None is 1.

    Raises TransportError, InvalidParameter for settings that do not fit the KV cache.
    """
    held = {each.dtype for each in layout.groups if DTYPE_BYTES[each.dtype] < 2}
    if held and config.kv_wire_dtype != "auto":
        allowed = f"auto: KV is held in {', '.join(sorted(held))}"
        raise InvalidParameter("kv_wire_dtype", config.kv_wire_dtype, allowed)
    metrics = metrics_of(registry)
    metrics.start(role)
    if transports is None:

        def count_garbage() -> None:
            metrics.garbage.labels("data").inc()

        transports = make_transports(
            config, incarnation, role, on_gpu=kv_cache.is_cuda, on_garbage=count_garbage
        )
    scales = kv_scales or [[1.0] * each.num_rows for each in layout.groups]
    return MoverParts(
        config=config,
        incarnation=incarnation,
        fingerprint=fingerprint,
        layout=layout,
        kv_cache=as_bytes(kv_cache, num_blocks, layout),
        kv_scales=tuple(torch.tensor(each).to(kv_cache.device) for each in scales),
        transports=transports,
        board=ProgressBoard(),
        metrics=metrics,
        notify=notify,
    )


def tell_transports(parts: MoverParts, role: str, wanted: str) -> None:
    """Log the usable transports; ``wanted`` is the best that could load."""
    preferred = next(iter(parts.transports))
    stands_in = parts.config.kv_connector == "auto" and preferred == "tcp"  # for nixl
    fallback = str(int(stands_in or preferred != wanted))
    parts.metrics.transport.labels(role, preferred, fallback).set(1)
    logger.info("%s moves KV by %s", role, ", ".join(parts.transports))
