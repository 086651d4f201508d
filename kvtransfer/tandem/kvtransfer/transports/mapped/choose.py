"""``cuda_p2p`` or ``shm``, by name, for a KV cache that they can reach."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped.copiers import Copier, CudaCopier, HostCopier
from tandem.kvtransfer.transports.mapped.transport import MappedTransport
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.protocol.ids import Incarnation


def make_mapped(
    name: str,
    incarnation: Incarnation,
    folder: str | None,
    *,
    on_gpu: bool,
    on_garbage: Callable[[], None],
) -> MappedTransport:
    """Return the transport ``name``. Raises TransportError if it cannot reach the KV cache."""
    if on_gpu != (name == "cuda_p2p"):
        where, allowed = ("a GPU", "cuda_p2p") if on_gpu else ("the host", "shm")
        raise TransportError(f"kv_connector: {name}, with KV in memory of {where}: try {allowed}")
    place, copier = open_folder(folder), make_copier(on_gpu)
    return MappedTransport(name, incarnation, copier, place, on_gpu=on_gpu, on_garbage=on_garbage)


def make_copier(on_gpu: bool) -> Copier:
    """Return the copier into this worker's memory."""
    if on_gpu:
        return CudaCopier(torch.device("cuda", torch.cuda.current_device()))
    return HostCopier()
