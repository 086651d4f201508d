"""Workers that pull prefixes from each other, in one process: engines, services, connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from tests.waiting import wait_for
from tests.workers.pair import ROUTER, SECONDS, Half

from tandem.engine.config import EngineConfig
from tandem.engine.executor.base import Executor
from tandem.engine.kv_memory import Capacity
from tandem.engine.scheduler.connector import KVConnector
from tandem.engine.scheduler.lending import CachedPrefixes
from tandem.kvtransfer.config import KVTransferConfig
from tandem.protocol.ids import RequestKey, new_incarnation
from tandem.protocol.requests import Consume, EngineCoreRequest, Produce, Pull
from tandem.protocol.sampling import SamplingParams
from tandem.worker.connectors.consumer import DecodeConnector
from tandem.worker.connectors.producer import PrefillConnector
from tandem.worker.connectors.role import (
    Ends,
    kv_cache_allocator,
    lending_only,
    make_consumer,
    make_producer,
    with_pulls,
)
from tandem.worker.launch import RoleContext, RoleParts


class Peer(Half):
    """One worker of either role that pulls and lends."""

    def __init__(self, kv: KVTransferConfig, *, decodes: bool, **settings: Any) -> None:
        self.kv = kv
        self.me = new_incarnation()
        self.registry = CollectorRegistry()
        self._decodes = decodes
        super().__init__(self._connect, kv_cache_allocator(kv), **settings)
        lend_from = self.parts.lend_from
        assert lend_from is not None
        lend_from(CachedPrefixes(self.core.scheduler, closed=lambda: self.core.takes_nothing))

    def _connect(self, config: EngineConfig, executor: Executor) -> KVConnector:
        (region,) = executor.regions()
        layout = config.layout
        context = RoleContext(
            config=config,
            capacity=Capacity(region.blocks.shape[0], layout),
            fingerprint=config.fingerprint(),
            incarnation=self.me,
            executor=executor,
            registry=self.registry,
            guard=None,
            notify=lambda: None,
        )
        self.parts: RoleParts
        if self._decodes:
            self.ends = Ends.of(
                make_producer(context, lending_only(self.kv)), make_consumer(context, self.kv)
            )
            own: KVConnector = DecodeConnector(self.ends.consumer, poll=self.ends.taken.of_handoffs)
        else:
            self.ends = Ends.of(make_producer(context, self.kv), make_consumer(context, self.kv))
            size = layout.block_size
            own = PrefillConnector(self.ends.producer, size, poll=self.ends.given.of_handoffs)
        self.parts = with_pulls(context, self.kv, self.ends, own, lends_only=self._decodes)
        assert self.parts.connector is not None
        return self.parts.connector

    def counted(self, name: str, **labels: str) -> float:
        """A series of this worker; 0 if there is none."""
        return self.registry.get_sample_value(f"tandem:kv_prefix_{name}", labels) or 0.0

    def cached(self, name: str) -> int | None:
        told = [each.num_cached_tokens for each in self.outputs if each.request == name]
        return next((each for each in told if each is not None), None)

    def close(self) -> None:
        self.parts.handoff.close()
        self.core.close()


class Peers:
    """Several of them, each linked to all others."""

    def __init__(
        self, roles: str, connector: str = "tcp", *, engine: dict[str, Any] | None = None, **kv: Any
    ) -> None:
        """``roles``: a letter a worker, p or d."""
        fields = {"kv_connector": connector, "kv_control_port": 0, "kv_pull_peers": 8, **kv}
        config = KVTransferConfig(**fields)
        self.workers = [Peer(config, decodes=role == "d", **(engine or {})) for role in roles]
        self.standing: set[int] = set()
        """Workers whose engine takes no step, by index."""
        for worker in self.workers:
            others = [each for each in self.workers if each is not worker]
            controls = {each.ends.producer.control: each.me for each in others}
            worker.parts.handoff.set_peers(controls)
        pairs = [(a, b) for a in self.workers for b in self.workers if a is not b]
        self.until(lambda: all(a.ends.consumer.peer_up(b.me) for a, b in pairs))
        self.until(lambda: all(b.me in a.ends.producer.consumers() for a, b in pairs))

    def __getitem__(self, index: int) -> Peer:
        return self.workers[index]

    def until(self, check: Callable[[], bool]) -> None:
        """Step all but those that stand until ``check`` holds."""

        def stepped() -> bool:
            for index, worker in enumerate(self.workers):
                if index not in self.standing:
                    worker.step()
            return check()

        seen = lambda: [(each.failed, each.refused) for each in self.workers]  # noqa: E731
        wait_for(stepped, SECONDS, every=0.001, seen=seen)

    def ask(
        self,
        at: int,
        name: str,
        prompt: Sequence[int],
        *,
        holder: int | None = None,
        num_tokens: int | None = None,
        pull_ms: int = 10_000,
        have: int = 0,
        kv: Produce | Consume | None = None,
        **params: Any,
    ) -> RequestKey:
        """A request at a worker, which is told to pull from ``holder``."""
        key = RequestKey(ROUTER, name, 0)
        asked = {"temperature": 0.0, "seed": 1, "max_tokens": 8} | params
        pull = None
        if holder is not None:
            count = len(prompt) if num_tokens is None else num_tokens
            pull = Pull(self[holder].me, count, pull_ms, have)
        request = EngineCoreRequest(
            key=key,
            prompt_token_ids=list(prompt),
            params=SamplingParams(**asked),
            budget_ms=15_000,
            kv=kv,
            pull=pull,
        )
        assert self[at].core.add(request) is None
        return key

    def run(self, at: int, name: str, prompt: Sequence[int], **more: Any) -> list[int]:
        """``ask``, to its end; its tokens."""
        self.ask(at, name, prompt, **more)
        self.until(lambda: self[at].finished(name))
        return self[at].tokens(name)

    def settled(self) -> None:
        """Wait until nothing is held anywhere, and look at every block."""
        self.until(lambda: all(each.free for each in self.workers))
        for each in self.workers:
            each.core.check_integrity()
            assert not each.failed

    def close(self) -> None:
        for each in self.workers:
            each.close()
