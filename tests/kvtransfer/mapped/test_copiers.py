"""What a copier of GPU memory tells where the device refuses, without a GPU."""

from __future__ import annotations

import pytest
import torch

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.mapped import copiers
from tandem.kvtransfer.transports.mapped.copiers import CudaCopier
from tandem.memory.device import MappedAllocator


def test_memory_that_torch_refuses_fails_the_transport_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not all errors are the driver's: another ended the transfer thread, which makes landing slots
    whenever an agent has come."""

    def refused(_allocator: MappedAllocator, _size: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    monkeypatch.setattr(copiers, "Lane", lambda _index: None)
    monkeypatch.setattr(MappedAllocator, "__init__", lambda *_: None)
    monkeypatch.setattr(MappedAllocator, "__call__", refused)
    with pytest.raises(TransportError, match=r"4096 bytes of GPU memory .* capturing"):
        CudaCopier(torch.device("cuda", 0)).make(4096)


def test_a_stream_that_a_full_device_does_not_give_is_said_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's start ended by torch's own error, with what it had called."""

    def refused(_index: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(copiers, "Lane", refused)
    with pytest.raises(TransportError, match=r"no stream to copy KV on: CUDA error: out of memory"):
        CudaCopier(torch.device("cuda", 0))
