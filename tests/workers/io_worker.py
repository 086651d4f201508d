"""A worker's I/O thread alone, with what the step loop would see."""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry
from tests.waiting import wait_for
from tests.workers.hand_router import WAIT_MS

from tandem.link.curve import CurveGuard
from tandem.protocol.card import Fingerprint, KVGroup, KVLayout, ModelCard, WorkerRole
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.messages import Beat, LoadReport, WorkerBeat
from tandem.worker.io import FromRouter, Inbox, IOThread, Item, LinkMetrics, RouterFound, RouterLost

GROUP = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
LOAD = LoadReport(num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=9, total_blocks=9)


class Worker:
    """An I/O thread on a port of its own."""

    def __init__(self, guard: CurveGuard | None = None) -> None:
        self.inbox = Inbox()
        self._taken: deque[Item] = deque()
        self.registry = CollectorRegistry()
        me = new_incarnation()
        fingerprint = Fingerprint(revision="r", dtype="float32", layout=KVLayout((GROUP,)))
        card = ModelCard(
            model="m",
            fingerprint=fingerprint,
            max_model_len=64,
            block_size=16,
            num_blocks=9,
            vocab_size=100,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_logprobs=5,
            role=WorkerRole.DECODE,
            incarnation=me,
        )
        self.thread = IOThread(
            endpoint="tcp://127.0.0.1:0",
            card=card,
            incarnation=me,
            inbox=self.inbox,
            beat=lambda: WorkerBeat(Beat(), LOAD),
            metrics=LinkMetrics(self.registry),
            guard=guard,
        )
        self.endpoint = self.thread.endpoint

    def next(self, router: Incarnation | None = None) -> FromRouter | RouterLost | None:
        """What the step loop would see next, greetings apart: of ``router`` alone, if it is said,
        since those of other tests are lost by and by."""
        return wait_for(lambda: self._next(router), WAIT_MS / 1000)[0]

    def _next(self, router: Incarnation | None) -> tuple[FromRouter | RouterLost | None] | None:
        self._taken += self.inbox.take()
        while self._taken:
            item = self._taken.popleft()
            if item is None:
                return (item,)
            if not isinstance(item, RouterFound) and router in (None, item.router):
                return (item,)
        return None

    def messages(self) -> list[FromRouter]:
        """What the step loop would see of routers' messages; they are left where they are."""
        self._taken += self.inbox.take()
        return [each for each in self._taken if isinstance(each, FromRouter)]

    def dropped(self, reason: str) -> float:
        name = "tandem:link_frames_dropped_total"
        return self.registry.get_sample_value(name, {"reason": reason}) or 0.0
