"""What is done to a pull while a frame of it is held: to its holder, KV, client or blocks."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import httpx
from tests.chaos.aim import HOLD_SECONDS, Aim, Aims, Held
from tests.chaos.baits import Baits
from tests.chaos.faults import Claims, Processes
from tests.chaos.memory import Flipper
from tests.chaos.schedule import WORDS, Fault, Kind
from tests.waiting import until

from tandem.kvtransfer.handoff.messages import Part, Ready

AIM_SECONDS = 30.0
"""For so long a pull is waited for."""
CROWD, CROWD_WORDS, CROWD_TOKENS = 12, 700, 24
"""Prompts that no cache has, and that together want more blocks than are free."""


class Place(Protocol):
    """Where pulls are: a line whose workers have proxies in front of them."""

    aims: Aims

    def pid_of(self, name: str) -> int: ...


class Strikes:
    def __init__(
        self,
        place: Place,
        processes: Processes,
        baits: Baits,
        *,
        url: str,
        model: str,
        num_blocks: int,
    ) -> None:
        """``num_blocks`` of a worker; ``url`` of the router."""
        self.hit: Counter[Kind] = Counter()
        """Pulls that were hurt, by how."""
        self.missed: Counter[Kind] = Counter()
        """Faults whose pull did not come, or had no bit to flip."""
        self._place = place
        self._processes = processes
        self._baits = baits
        self._url, self._model = url, model
        self._num_blocks = num_blocks

    async def strike(self, fault: Fault, claims: Claims, leave: Callable[[], int]) -> float | None:
        aim = Aim(fault.role, claims.take)
        self._place.aims.add(aim)
        baits = asyncio.create_task(self._baits.ask(str(fault)))
        with suppress(AssertionError):  # no thread stands here, of which there are few
            await until(lambda: aim.held, AIM_SECONDS)
        held = aim.wait(0.0)
        self._place.aims.remove(aim)
        if held is None:
            await baits
            self.missed[fault.kind] += 1
            return None
        when = time.monotonic()
        try:
            hit = await self._hurt(fault, held, leave)
        finally:
            held.release()
            claims.give(held.holder)
            await baits
        (self.hit if hit else self.missed)[fault.kind] += 1
        return when if hit else None

    async def problems(self) -> list[str]:
        """When all is whole again: baits with a wrong answer; and a run in which no pull was hurt
        has shown nothing of it."""
        wrong = await self._baits.judge()
        return wrong if self.hit else [*wrong, f"no pull was hurt: {self}"]

    def __str__(self) -> str:
        hit = ", ".join(f"{kind} {count}" for kind, count in self.hit.most_common())
        missed = f"{self.missed.total()} faults found none, or no bit"
        return f"pulls hurt: {hit or 'none'}; {missed}; {self._baits}"

    async def _hurt(self, fault: Fault, held: Held, leave: Callable[[], int]) -> bool:
        holder, hurt = held.holder, self._processes.signal
        if fault.kind is Kind.PULL_KILL:
            await asyncio.to_thread(hurt, holder, signal.SIGKILL)
            held.release()
            await asyncio.sleep(fault.seconds)
            self._processes.start(holder)
            await asyncio.to_thread(self._processes.wait, holder)
        elif fault.kind is Kind.PULL_STOP:
            await asyncio.to_thread(hurt, holder, signal.SIGSTOP)
            held.release()
            await asyncio.sleep(fault.seconds)
            await asyncio.to_thread(hurt, holder, signal.SIGCONT)
        elif fault.kind is Kind.PULL_FLIP:
            return await asyncio.to_thread(self._flip, held)
        elif fault.kind is Kind.PULL_CANCEL:
            return leave() + self._baits.leave() > 0
        else:
            await self._evict(decode_batch=fault.kind is Kind.PULL_CROWD, seed=fault.at)
        return True

    def _flip(self, held: Held) -> bool:
        flipper = Flipper(self._place.pid_of(held.holder), self._num_blocks, seed=0)
        message = held.message
        if isinstance(message, Part):
            return flipper.flip_part(message.key, message.index)
        assert isinstance(message, Ready), f"{message} says of no KV"
        return flipper.flip_tag(message.blocks[0][-1])  # the first may be cached by who pulls

    async def _evict(self, *, decode_batch: bool, seed: int) -> None:
        """Have every worker forget what nobody holds; or have a crowd want all blocks, for as long
        as a frame may be held."""
        async with httpx.AsyncClient(base_url=self._url, timeout=60.0) as http:
            if not decode_batch:
                with suppress(httpx.HTTPError):  # a worker that is down does not answer
                    await http.post("/reset_prefix_cache")
                return
            draw = random.Random(f"crowd {seed}")
            asking = [asyncio.create_task(self._ask(http, draw)) for _ in range(CROWD)]
            await asyncio.wait(asking, timeout=HOLD_SECONDS / 2)
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        """Whatever comes of it: who is asked is hurt."""
        prompt = " ".join(draw.choices(WORDS, k=CROWD_WORDS))
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": CROWD_TOKENS}
        await http.post("/v1/completions", json=body)
