"""Types of the ranks' KV memory, shared by plan, run and executors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tandem.protocol.card import KVLayout

if TYPE_CHECKING:
    from torch import Tensor


class StepSize(NamedTuple):
    """Size of a graph of a whole step, to which smaller steps are padded."""

    decodes: int
    chunk_tokens: int
    """Tokens of all rows of prompts."""
    chunks: int
    """Maximum rows of prompts."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of the ranks, known after the weights are loaded."""

    num_blocks: int
    layout: KVLayout
    num_cpu_blocks: int = 0
    device_name: str = ""
    """Driver's name of the rank's device; empty for a CPU."""
    step_sizes: tuple[StepSize, ...] = ()
    """Graphs of steps: a step is padded to the first that holds it."""


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One rank's KV memory, as this process reaches it."""

    rank: int
    blocks: Tensor
    """uint8 [num_blocks, block_bytes], dense, on the rank's device."""


KVCacheAllocator = Callable[[int], Any]
"""Function from bytes to a writable flat uint8 tensor, whose memory it owns. The default is
``torch.empty``; roles pass one that registers the memory with a transport."""
