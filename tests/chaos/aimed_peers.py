"""Two workers in this process that pull from each other, with a proxy in front of each: what passes
between them may be held while something is done to either end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.aim import Aim, Aims, Held
from tests.chaos.proxy import ADVERTISED, LISTENED, Proxy
from tests.workers.pair import PROMPT, ROUTER
from tests.workers.pullers import Peers

from tandem.cli.serve.listening import free_ports
from tandem.protocol.ids import RequestKey

BUDGET_MS = 60_000
"""Of a pull that no deadline ends before the test's own."""


class AimedPeers:
    """Worker 1 holds ``PROMPT``, worker 0 pulls it."""

    def __init__(self, connector: str, folder: Path | None = None, **more: Any) -> None:
        """``folder`` is that of the node's agent. Of ``more``, ``engine`` has settings of both
        engines, and the rest are those of the hand-off."""
        node = None if folder is None else str(folder)
        self.peers = Peers("dd", connector, kv_node_folder=node, **more)
        self.aims = Aims()
        self.too_late = 0
        """Pulls that were over before their frame was said."""
        self.proxies = [self._proxy(number) for number in range(2)]
        self._meet()
        self.before = self.peers.run(1, "before", PROMPT)

    def hold(
        self, moment: str, name: str, budget_ms: int = BUDGET_MS, **params: Any
    ) -> tuple[Held, RequestKey]:
        """A pull of which this frame is held, and the key of its request. Where a slow machine has
        spent the budget before, it is asked anew with twice as much."""
        aim = Aim(moment, key=RequestKey(ROUTER, name, 0).for_pull)
        self.aims.add(aim)
        key = self.peers.ask(0, name, PROMPT, holder=1, pull_ms=budget_ms, **params)
        self.peers.until(lambda: aim.held is not None or self.peers[0].finished(name))
        self.aims.remove(aim)
        if (held := aim.wait(0.0)) is not None:
            assert held.holder == "worker-1"
            return held, key
        assert budget_ms < BUDGET_MS, f"no {moment} was said"
        self.too_late += 1
        self.forget()
        return self.hold(moment, f"{name} again", 2 * budget_ms, **params)

    def forget(self) -> None:
        self.peers.settled()
        self.peers[0].core.manager.reset_prefix_cache()

    def fallbacks(self, reason: str) -> float:
        """Prefixes that worker 0 computed after all, by why."""
        return self.peers[0].counted("pull_fallbacks_total", reason=reason)

    @property
    def pulled(self) -> float:
        return self.peers[0].counted("pulls_total")

    def close(self) -> None:
        self.peers.close()
        for each in self.proxies:
            each.stop()

    def _proxy(self, number: int) -> Proxy:
        producer = self.peers[number].ends.producer
        transport: Any = producer._mover.parts.transports.get("tcp")
        data = free_ports(1)[0] if transport is None else transport._server.port
        port = int(producer.control.rpartition(":")[2])
        made = Proxy(port, data, number, name=f"worker-{number}", aims=self.aims)
        made.start()
        return made

    def _meet(self) -> None:
        """Each knows the other by the address of its proxy alone."""
        peers = self.peers
        for at in (0, 1):
            other = peers[1 - at]
            peers[at].parts.handoff.set_peers({})
            self._until_link(at, up=False)
            control = other.ends.producer.control.replace(LISTENED, ADVERTISED)
            peers[at].parts.handoff.set_peers({control: other.me})
            self._until_link(at, up=True)

    def _until_link(self, at: int, *, up: bool) -> None:
        mine, other = self.peers[at], self.peers[1 - at]
        self.peers.until(lambda: mine.ends.consumer.peer_up(other.me) is up)
        self.peers.until(lambda: (mine.me in other.ends.producer.consumers()) is up)


@contextmanager
def aimed(connector: str, node: Callable[[], Path], **more: Any) -> Iterator[AimedPeers]:
    """Ended with the test; ``node`` gives a folder in which an agent serves."""
    made = AimedPeers(connector, node() if connector == "shm_agent" else None, **more)
    try:
        yield made
    finally:
        made.close()
