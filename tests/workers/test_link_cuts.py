"""A prompt is cut for the link that its KV goes by: a pair of engines over a line that is slowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.workers.pair import Pair
from tests.workers.slow_line import ADVERTISED, SlowLine

from tandem.cli.ports import free_ports
from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Executor
from tandem.engine.scheduler.connector import KVConnector
from tandem.prefill.connector import PrefillConnector

FAST, SLOW = 1e12, 8e6
"""Bytes a second: one holds nothing up; by the other KV takes longer than its prompt."""
LENGTH = 192
"""Tokens of a prompt, and of its usual chunk."""


class LinkedPair(Pair):
    """P and D on a line of their own, P's prompts cut for it."""

    def __init__(self, folder: Path, *, cuts_for_links: bool = True) -> None:
        control, data = free_ports(2)
        self._cuts_for_links = cuts_for_links
        self.line = SlowLine(control, data, FAST)
        engine = {
            "folder": folder,
            "num_gpu_blocks_override": 80,
            "max_num_batched_tokens": 512,
            "long_prefill_token_threshold": LENGTH,
        }
        ports = {"kv_control_port": control, "kv_data_port": data}
        super().__init__("tcp", engine=engine, kv_advertise_host=ADVERTISED, **ports)

    def _producer(self, config: EngineConfig, executor: Executor) -> KVConnector:
        super()._producer(config, executor)
        return PrefillConnector(
            self.producer, config.cache.block_size, cuts_for_links=self._cuts_for_links
        )

    def chunks(self, name: str) -> tuple[int, list[int]]:
        """Of a prompt that nobody has cached: the steps of it, and the tokens that D said."""
        number = sum(map(ord, name))
        prompt = [1000 + (31 * index + 97 * number) % 9000 for index in range(LENGTH)]
        before = self._counted()
        self.ask(name, prompt, max_tokens=4)
        self.until(lambda: self.decode.finished(name) and self.prefill.free)
        return self._counted() - before, self.decode.tokens(name)

    def _counted(self) -> int:
        samples = next(iter(self.producer._metrics.chunks.collect())).samples
        return round(sum(each.value for each in samples if each.name.endswith("_sum")))

    def close(self) -> None:
        """End the line, too."""
        super().close()
        self.line.close()
