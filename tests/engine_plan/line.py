"""A decode worker that is full, under hand-offs that never end: who gets blocks, and when.

The real EngineCore over SimExecutor with a hand-driven connector: each step some hand-offs arrive,
announced ones are delivered after a few steps, and it is noted for how many steps each request was
the first of all that want blocks.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.engine_plan.builders import Harness, params_of, request_of
from tests.engine_plan.handoff import ConsumerSide
from tests.engine_plan.pair import consume

from tandem.engine.request import Request, RequestState
from tandem.protocol.ids import RequestKey
from tandem.protocol.kv import FirstToken, Loaded
from tandem.protocol.requests import EngineCoreRequest


@dataclass(frozen=True)
class Traffic:
    seed: int = 0
    num_blocks: int = 16
    seats: int = 8
    watermark: float = 0.0
    overlap: bool = False
    policy: str = "fcfs"
    longest_prompt: int = 60
    longest_output: int = 40
    whole_share: float = 0.2
    """Of what arrives, requests that are computed here."""
    ready_share: float = 0.8
    """Of the hand-offs, those whose KV is announced at once; the others a few steps later."""
    load_steps: int = 4
    """From the reservation to the last byte, at most."""


@dataclass
class Line:
    """An engine, the wire that feeds it, and how long each request was first in line."""

    traffic: Traffic
    waited: dict[str, int] = field(default_factory=dict)
    """Steps for which a request was the first that wanted blocks, and got none."""
    served: int = 0

    def __post_init__(self) -> None:
        traffic = self.traffic
        self.random = random.Random(traffic.seed)
        self.side = ConsumerSide()
        self.harness = Harness(
            traffic.num_blocks,
            connector=self.side,
            max_num_seqs=traffic.seats,
            watermark=traffic.watermark,
            async_scheduling=traffic.overlap,
            policy=traffic.policy,
        )
        self.number = 0
        self.due: dict[RequestKey, int] = {}
        """Loads on their way: steps until they land."""
        self.requests: dict[RequestKey, EngineCoreRequest] = {}

    def run(self, steps: int) -> None:
        """Keep a few in the queue and several hand-offs ready, for so many steps."""
        for _ in range(steps):
            while self._num_queued < 3 * self.traffic.seats:
                self.arrive()
            self.turn()

    def drain(self, limit: int = 5000) -> None:
        """Nothing more arrives; everything that is here must end."""
        for _ in range(limit):
            if not self.harness.core.has_work:
                return
            self.turn()
        raise AssertionError(f"not done after {limit} steps: {self.harness.core.stats()}")

    @property
    def _num_queued(self) -> int:
        stats = self.harness.core.stats()
        return int(stats["waiting"] + stats["parked"])

    def arrive(self) -> EngineCoreRequest:
        """One more request: whole, or a hand-off."""
        pick, traffic = self.random, self.traffic
        self.number += 1
        fields: dict[str, Any] = {
            "prompt": [pick.randrange(50) for _ in range(pick.randint(1, traffic.longest_prompt))],
            "params": params_of(
                max_tokens=pick.randint(1, traffic.longest_output), ignore_eos=True
            ),
        }
        whole = pick.random() < traffic.whole_share
        make = request_of if whole else consume
        request = make(f"r{self.number}", **fields)
        assert self.harness.add(request) is None
        self.requests[request.key] = request
        if not whole and pick.random() < traffic.ready_share:
            self.side.ready[request.key] = len(request.prompt_token_ids)
        return request

    def turn(self) -> None:
        """One step of the engine, and of the wire."""
        first = self.first
        self.harness.step()
        if first is not None and first is self.first:
            name = first.key.request
            self.waited[name] = self.waited.get(name, 0) + 1
        for key in sorted(self.side.loading - set(self.due)):
            self.due[key] = self.random.randint(1, self.traffic.load_steps)
        for key in sorted(self.due):
            self.due[key] -= 1
            if self.due[key] <= 0:
                del self.due[key]
                self._deliver(key)
        for key, request in self.requests.items():
            late = request.kv is not None and key not in self.side.ready
            if late and self.random.random() < 0.2:
                self.side.ready[key] = len(request.prompt_token_ids)

    @property
    def first(self) -> Request | None:
        """Of all that want blocks and may have them: who came first (or goes first)."""
        request_table = self.harness.core.scheduler.request_table
        parked = [
            each
            for each in request_table.by_seq.values()
            if each.state is RequestState.WAITING_FOR_REMOTE_KVS
        ]
        ready = [each for each in parked if each.key in self.side.ready]
        return min(
            [*request_table.waiting.in_order(), *ready], key=lambda each: each.order, default=None
        )

    def _deliver(self, key: RequestKey) -> None:
        """The bytes that a right producer would have sent, and its first token."""
        request = self.requests[key]
        (block_ids,), tokens = self.side.loads[key]
        model = self.harness.executor.model
        states: list[int] = []
        for token in request.prompt_token_ids:
            states.append(model.write(states[-1] if states else None, token))
        self.harness.executor.fill(block_ids, tokens, states[tokens.start : tokens.stop])
        token = model.draw(states[-1], request.params, 0, 0, request.eos_token_ids)
        self.side.loading.discard(key)
        self.side.events.append(Loaded(key, (FirstToken(0, token),)))
        self.served += 1
