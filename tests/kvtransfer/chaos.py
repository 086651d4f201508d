"""Two producers and two consumers between which links, connections and transports break at random.

Holds what must hold all the while: each key ends once at its consumer and is released once by its
producer, and what was loaded is right.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from dataclasses import dataclass, field
from typing import Any

from tests.kvtransfer.builders import (
    BLOCK,
    NUM_BLOCKS,
    Consumer,
    Producer,
    Switch,
    kv_of,
    make_config,
    make_key,
    only,
)
from tests.kvtransfer.uneven import Uneven, uneven
from tests.waiting import SECONDS, wait_for

from tandem.kvtransfer import events
from tandem.kvtransfer.control.mail import Drop
from tandem.kvtransfer.transports.tcp import TcpTransport
from tandem.protocol.card import blocks_for
from tandem.protocol.ids import RequestKey

ENDINGS = (events.Loaded, events.LoadFailed, events.Cancelled)
TOKENS = (1, 4, 13, 16, 24)
PAUSE_SECONDS, STEP_SECONDS = 0.3, 0.005


@dataclass(slots=True)
class HandOff:
    key: RequestKey
    tokens: int
    producer: Producer
    consumer: Consumer
    home: list[int]
    target: list[int]
    computed: int = 0
    finished: bool = False
    released: bool = False
    ended: bool = False
    free: bool = False

    @property
    def over(self) -> bool:
        """Nothing of it is left at either end."""
        return self.released and self.ended and self.free


@dataclass
class Chaos:
    """Two producers, two consumers, and who breaks what lies between."""

    producers: list[Producer]
    consumers: list[Consumer]
    draw: random.Random
    live: dict[RequestKey, HandOff] = field(default_factory=dict)
    loaded: int = 0
    node: Any = None
    """What has an agent that may be ended, and begins the next one, if KV goes by one."""
    at_odds: bool = True
    """Requests are cancelled and end early, too."""

    def __post_init__(self) -> None:
        self.workers: list[Any] = [*self.producers, *self.consumers]
        self.spare = {id(each): list(range(NUM_BLOCKS)) for each in self.workers}

    # -- what engines do ------------------------------------------------------------------------

    def begin(self, name: str, producer: Producer, consumer: Consumer) -> None:
        """Admit a key and ask for it, in either order, if there are blocks for it."""
        tokens = self.draw.choice(TOKENS)
        count = blocks_for(tokens, BLOCK)
        homes, targets = self.spare[id(producer)], self.spare[id(consumer)]
        if min(len(homes), len(targets)) < count:
            return
        each = HandOff(make_key(name), tokens, producer, consumer, [], [])
        first = self.draw.random() < 0.5
        if first:
            consumer.open(each.key, producer.incarnation, budget_ms=3000)
        each.home, each.target = ([pile.pop() for _ in range(count)] for pile in (homes, targets))
        if producer.admit(each.key, tokens, consumer.incarnation, budget_ms=3000) is not None:
            each.finished = True
            self._release(each)
        if not first:
            consumer.open(each.key, producer.incarnation, budget_ms=3000)
        self.live[each.key] = each

    def step(self) -> None:
        for each in list(self.live.values()):
            self._compute(each)
            if self.at_odds and self.draw.random() < 0.01:
                self.draw.choice((each.producer, each.consumer)).service.cancel(each.key)
        for worker in self.workers:
            self._take(worker)
        for key in [key for key, each in self.live.items() if each.over]:
            del self.live[key]

    def _release(self, each: HandOff) -> None:
        """P's blocks are the next request's at once, whatever D still does with them."""
        each.released = True
        self.spare[id(each.producer)] += each.home

    def _free(self, each: HandOff) -> None:
        each.free = True
        self.spare[id(each.consumer)] += each.target

    def _compute(self, each: HandOff) -> None:
        if each.finished or self.draw.random() < 0.3:
            return
        each.computed = min(each.tokens, each.computed + 8)
        used = each.home[: blocks_for(each.computed, BLOCK)]
        each.producer.kv_cache[used] = kv_of(each.key.request, each.tokens)[: len(used)]
        each.producer.service.computed(each.key, only(used), each.computed, Switch(done=True))
        if each.computed == each.tokens:
            each.finished = True
            fate = self.draw.random() if self.at_odds else 1.0
            if fate < 0.05:
                each.producer.service.finished(each.key)
            else:
                each.producer.end(each.key, "stop" if fate < 0.15 else None)

    def _take(self, worker: Producer | Consumer) -> None:
        for event in worker.service.poll():
            each = self.live[event.key]
            if isinstance(event, events.Released):
                if isinstance(worker, Producer):
                    assert not each.released, f"{event} twice"
                    self._release(each)
                else:
                    assert not each.free, f"{event} twice"
                    self._free(each)
            elif isinstance(event, events.Ready):
                each.consumer.service.begin_load(each.key, only(each.target), 0, event.num_tokens)
            elif isinstance(event, ENDINGS) and isinstance(worker, Consumer):
                assert not each.ended, f"{event} is a second ending"
                each.ended = True
                if isinstance(event, events.Loaded) and event.usable:
                    self.loaded += 1
                    assert each.consumer.holds(each.key.request, each.tokens, each.target)
                if getattr(event, "blocks_free", True):
                    self._free(each)

    # -- what breaks ----------------------------------------------------------------------------

    def breaks(self) -> None:
        worker = self.draw.choice(self.workers)
        mover = worker.service._mover
        transport = next(iter(mover.parts.transports.values()))
        what = self.draw.choice(("peers", "link", "data", "pause"))
        if what == "data" and self.node is not None:
            self.node.again()
        elif what == "peers":
            self.meet(self.draw.choice(self.consumers), self.draw.choice(self.producers))
        elif what == "link" and mover._links:
            link = self.draw.choice(list(mover._links.values()))
            worker.service._channel.post(Drop(link, "chaos", self.draw.choice((0, 200))))
        elif what == "data" and isinstance(transport, TcpTransport) and transport._links:
            link = self.draw.choice(list(transport._links.values()))
            sock = self.draw.choice(link.streams).sock
            with contextlib.suppress(OSError):  # closed meanwhile
                if sock is not None:
                    sock.shutdown(socket.SHUT_RDWR)
        elif what == "pause" and isinstance(transport, Uneven):
            transport.until = time.monotonic() + PAUSE_SECONDS

    def meet(self, consumer: Consumer, *but: Producer) -> None:
        peers = [each for each in self.producers if each not in but]
        consumer.service.set_peers([each.service.control for each in peers])

    def calm(self) -> None:
        """Wait until all keys are over, all slots free and all links up."""
        for consumer in self.consumers:
            self.meet(consumer)
        troubles: list[str] = []

        def calm() -> bool:
            troubles[:] = self._troubles()
            return not troubles

        wait_for(calm, SECONDS, every=STEP_SECONDS, seen=lambda: troubles)

    def _troubles(self) -> list[str]:
        """Keys that are not over, slots that are held, links that are down."""
        self.step()
        troubles = [f"{each.key.request} is on its way" for each in self.live.values()]
        for worker in self.workers:
            ring = worker.service._mover.table.ring
            if ring.free < len(ring):
                troubles.append(f"{type(worker).__name__} has {len(ring) - ring.free} slots held")
        pairs = [(c.service, p.incarnation) for c in self.consumers for p in self.producers]
        return troubles + [each.why_down(peer) for each, peer in pairs if not each.peer_up(peer)]


def make_chaos(workers, connector: str, seed: int, node: Any = None) -> Chaos:
    """All links up; ``node`` has the agent, where KV goes by one."""
    folder = None if node is None else node.agent.path.parent
    config = make_config(
        kv_connector=connector,
        kv_transfer_seconds=1.0,
        kv_commit_seconds=0.5,
        kv_expect_seconds=1.0,
        kv_lease_seconds=2.0,
        kv_connect_seconds=1.0,
    )
    producers, consumers = (
        [
            workers(kind, config, transports=uneven(connector, kind.__name__.lower(), folder))
            for _ in range(2)
        ]
        for kind in (Producer, Consumer)
    )
    chaos = Chaos(producers, consumers, random.Random(seed), node=node)
    chaos.calm()
    return chaos
