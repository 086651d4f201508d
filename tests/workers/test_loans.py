"""Loans of cached prefixes of all groups: full attention, a window and a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry
from tests.engine_plan.builders import Harness, facts_of_layers, params_of, request_of
from tests.kvtransfer.builders import Consumer, Producer, make_config
from tests.waiting import wait_for

from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.kvtransfer import events
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.worker.connectors.prefix_fetch import LendConnector, PullMetrics

KEY = RequestKey(b"R" * 16, "a", 0).for_pull
SIZE, WINDOW, TOKENS = 16, 20, 64


class Lender:
    """An engine with a cached prompt, a hand-off's services, and the connector between them."""

    def __init__(self, connector: str, share: float) -> None:
        facts = facts_of_layers("all", WINDOW)
        self.harness = Harness(facts=facts, max_num_batched_tokens=32, block_size=SIZE)
        layout, config = self.harness.config.layout, make_config(kv_connector=connector)
        self.producer = Producer(config, layout=layout)
        self.consumer = Consumer(config, layout=layout)
        self.consumer.meet(self.producer)
        self.producer.kv_cache.random_(1, 256)
        self.metrics = PullMetrics(CollectorRegistry())
        service = self.producer.service
        self.lender = LendConnector(service, share, self.metrics, poll=service.poll)
        self.lender.lend_from(CachedPrefixes(self.harness.core.scheduler))
        self.hashes: list[BlockHash] = self._computed()

    def _computed(self) -> list[BlockHash]:
        harness = self.harness
        harness.add(request_of("before", TOKENS + 1, params=params_of(max_tokens=1)))
        (request,) = harness.core.scheduler.request_table.by_seq.values()
        hashes = list(request.hashes_upto(TOKENS // SIZE))
        harness.run()
        return hashes

    def poll(self) -> None:
        """Give released loans back to the engine."""
        for event in self.lender.poll():
            assert self.harness.core.scheduler.request_table.released(event.key)

    def ask(self) -> int:
        """D requests the whole prompt; return the tokens that are lent."""
        producer, service = self.producer.incarnation, self.consumer.service
        service.open(KEY, producer, budget_ms=10_000, hashes=self.hashes)
        ready: events.Ready = self.wait_for(events.Ready)
        return ready.num_tokens

    def wait_for(self, kind: type[Any]) -> Any:
        def found() -> object:
            self.poll()
            return next((each for each in self.consumer.seen if isinstance(each, kind)), None)

        return self.consumer.until(found)

    def close(self) -> None:
        self.producer.service.close()
        self.consumer.service.close()


@pytest.fixture
def lenders() -> Iterator[Callable[[str, float], Lender]]:
    made: list[Lender] = []

    def make(connector: str, share: float) -> Lender:
        made.append(Lender(connector, share))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("connector", ["tcp", "shm"])
def test_a_loan_is_of_all_groups_and_counts_their_blocks(lenders, connector):
    """Four blocks of full attention, two of the window, one state; all are given back."""
    pair = lenders(connector, 1.0)
    assert pair.ask() == TOKENS
    assert pair.lender.num_lent == pair.producer.service.leased_blocks() == 7
    lent = pair.harness.core.manager.lend(pair.hashes).tables
    mine = ((10, 11, 12, 13), (-1, -1, 22, 23), (30,))
    pair.consumer.service.begin_load(KEY, mine, 0, TOKENS, pair.hashes)
    pair.wait_for(events.Loaded)
    groups = pair.harness.config.layout.groups
    for group, theirs, ours in zip(groups, lent, mine, strict=True):
        wanted = pair.producer.kv_cache[[block for block in theirs if block >= 0]]
        found = pair.consumer.kv_cache[[block for block in ours if block >= 0]]
        assert torch.equal(found[:, : group.block_bytes], wanted[:, : group.block_bytes])
    wait_for(lambda: pair.poll() or not pair.lender.has_pending())


def test_a_share_of_the_blocks_bounds_the_loan(lenders):
    """Six blocks hold three spans of full attention, two of the window, and the state."""
    pair = lenders("tcp", 6 / 64)
    assert 0 < pair.ask() < TOKENS
    assert 0 < pair.lender.num_lent <= 6
