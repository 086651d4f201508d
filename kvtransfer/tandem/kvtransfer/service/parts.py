"""Shared parts of both services, and checks of their arguments."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from tandem.kvtransfer.config import KVTransferConfig
from tandem.kvtransfer.metrics import metrics_of
from tandem.kvtransfer.mover.mover import MoverParts
from tandem.kvtransfer.transports.base import Transport
from tandem.kvtransfer.transports.choose import make_transports
from tandem.kvtransfer.waiting import ProgressBoard
from tandem.protocol.card import Fingerprint
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import Incarnation
from tandem.protocol.layout import DTYPE_BYTES, KVLayout

logger = logging.getLogger(__name__)


def as_bytes(kv_cache: Tensor, num_blocks: int, layout: KVLayout) -> Tensor:
    """Return the KV cache as uint8 [num_blocks, block_bytes], sharing its memory. Raises
    InvalidParameter when it is not dense or not of that size.
    """
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
) -> MoverParts:
    """Choose the transports and put everything together. Raises TransportError, and
    InvalidParameter for what the KV cannot travel as."""
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
    return MoverParts(
        config=config,
        incarnation=incarnation,
        fingerprint=fingerprint,
        layout=layout,
        kv_cache=as_bytes(kv_cache, num_blocks, layout),
        transports=transports,
        board=ProgressBoard(),
        metrics=metrics,
        notify=notify,
    )


def tell_transports(parts: MoverParts, role: str, wanted: str) -> None:
    """Report by which ways KV moves, once it is known which of them can be served; ``wanted`` is
    the best that could load."""
    preferred = next(iter(parts.transports))
    stands_in = parts.config.kv_connector == "auto" and preferred == "tcp"  # for nixl
    fallback = str(int(stands_in or preferred != wanted))
    parts.metrics.transport.labels(role, preferred, fallback).set(1)
    logger.info("%s moves KV by %s", role, ", ".join(parts.transports))
