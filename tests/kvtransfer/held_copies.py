"""A pair whose copies from block to block wait for the test."""

from __future__ import annotations

from tests.kvtransfer.builders import Consumer, Producer, make_config, make_key
from tests.kvtransfer.memory_transport import MemoryTransport

from tandem.kvtransfer.memory.blocks import CLEARED

KEY, OTHER = make_key("one"), make_key("two")


class Held:
    """A pair whose copies wait for the test."""

    def __init__(self, workers, **config) -> None:
        made = make_config(kv_connector="memory_blocks", **config)
        self.transport = MemoryTransport(direct=True)
        self.producer = workers(Producer, made)
        self.consumer = workers(Consumer, made, transports={"memory_blocks": self.transport})
        self.consumer.meet(self.producer)
        self.tags = self.producer.service._mover.blocks.tags
        self.transport.hold.set()

    def copy(self, blocks: list[int], into: list[int]) -> None:
        """Hand KEY over as far as a copy that is on its way."""
        self.consumer.open(KEY, self.producer.incarnation)
        self.producer.hand_over(KEY, 4 * len(blocks), blocks, self.consumer.incarnation)
        self.consumer.load(KEY, into)
        self.consumer.until(lambda: self.transport._reads)

    def nothing_is_held(self) -> None:
        self.consumer.until(lambda: not self.consumer.service.has_pending())
        self.producer.until(lambda: not self.producer.service.has_pending())
        assert all(self.tags.read(block) == CLEARED for block in range(64))
