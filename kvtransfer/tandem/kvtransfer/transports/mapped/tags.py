"""The tags of a producer's blocks as another process maps them, and how often each has changed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.kernels.memory.shared import SharedMemory, check_touched
from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.memory.blocks import TAG_BYTES, TURN_BYTES

Numbers = NDArray[np.int64]
Turns = NDArray[np.uint64]


class PeerTags:
    """Mapped on construction; unmapped when nothing refers to it."""

    def __init__(self, descriptor: int, size: int) -> None:
        """The descriptor stays the caller's. Raises TransportError, also for pages that P has not
        touched: reading them would make them this process's."""
        try:
            check_touched(descriptor, size)
            mapping = SharedMemory.given(descriptor, size).map(writable=False)
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"a peer's tags cannot be mapped: {error}") from error
        count = len(mapping) // (TAG_BYTES + TURN_BYTES)
        table = np.frombuffer(mapping, np.uint8, count * TAG_BYTES)
        self._tags: NDArray[np.uint8] = table.reshape(count, TAG_BYTES)
        self._turns: Turns = np.frombuffer(mapping, np.uint64, count, count * TAG_BYTES)

    def __len__(self) -> int:
        return len(self._turns)

    def turns_of(self, blocks: Numbers) -> Turns:
        """Return the current turns of the blocks' tags."""
        return self._turns[blocks]

    def tags_of(self, blocks: Numbers, turns: Turns) -> bytes:
        """Return the current tags, one after another, cleared if their turn has changed. P
        raises a block's turn before it changes its tag."""
        tags, now = self._tags[blocks], self._turns[blocks]
        if now.tobytes() != turns.tobytes():
            tags[now != turns] = 0
        return tags.tobytes()
