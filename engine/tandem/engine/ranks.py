"""Group of ranks that share each layer: the sums and gathers between them.

Weights are cut as in Megatron-LM (Shoeybi et al., 2019): one sum after each attention and each MLP.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from tandem.protocol.errors import TandemError

if TYPE_CHECKING:
    from torch import Tensor

BACKENDS = {"cpu": "gloo"}
"""Backend of torch.distributed by device."""
GROUP_SECONDS = 3600.0
"""Deadline of an exchange. Ranks may load weights for different times; the executor's deadline of a
step is shorter."""
_INTERFACE = "GLOO_SOCKET_IFNAME"


class GroupError(TandemError):
    """An exchange failed because another rank has ended or is silent."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank ``rank`` of ``size``, each in its own process. Every rank must make the same calls in
    the same order. A single rank exchanges nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, rank: int, size: int, *, store: str, device: str) -> Ranks:
        """Return the rank after all ``size`` have joined. ``store`` is the URL of a new file that
        they share. Raises GroupError."""
        if size > 1:
            from torch import distributed

            names = [name for _, name in socket.if_nameindex()]
            os.environ[_INTERFACE] = next(name for name in names if name.startswith("lo"))
            _exchange(
                distributed.init_process_group,
                BACKENDS[device],
                init_method=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=GROUP_SECONDS),
            )
        return cls(rank, size)

    def sum(self, partial: Tensor) -> Tensor:
        """Replace ``partial`` by the sum over the ranks, the same bits on each, and return it.
        Raises GroupError."""
        if self.size > 1 and partial.numel():
            from torch import distributed

            _exchange(distributed.all_reduce, partial)
        return partial

    def gather(self, part: Tensor) -> Tensor:
        """Return the parts [rows, columns] of all ranks side by side: [rows, size * columns].
        Raises GroupError."""
        if self.size == 1:
            return part
        import torch

        parts = part.new_empty(self.size, *part.shape)
        if part.numel():
            gather = torch.distributed.all_gather_into_tensor
            _exchange(gather, parts.flatten(0, 1), part)
        return torch.cat(parts.unbind(), 1)

    def least(self, number: int) -> int:
        """Return the smallest of the ranks' numbers. Raises GroupError."""
        if self.size == 1:
            return number
        import torch

        found = torch.tensor([number])
        _exchange(torch.distributed.all_reduce, found, op=torch.distributed.ReduceOp.MIN)
        return int(found)

    def leave(self) -> None:
        """End the exchanges of this process."""
        if self.size > 1:
            from torch import distributed

            distributed.destroy_process_group()


ALONE = Ranks()


def _exchange(call: Callable[..., Any], *args: object, **options: object) -> None:
    try:
        call(*args, **options)
    except RuntimeError as error:
        raise GroupError(f"the exchange with the other ranks failed: {error}") from error
