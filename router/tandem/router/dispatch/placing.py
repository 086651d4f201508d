"""Placement of a job's next attempt, without blocking the loop.

Missing hashes are computed in a thread, and the ceiling counts in several rounds. Jobs that become
ready together take a round each.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

from tandem.llm.cpu_pool import CpuPool
from tandem.protocol.errors import RequestRefused
from tandem.protocol.ids import BlockHash, Incarnation
from tandem.router.dispatch.admission import Turns
from tandem.router.dispatch.explain import raise_if_non_retryable, too_late
from tandem.router.dispatch.fleet import Fleet
from tandem.router.dispatch.job import Job, Scene
from tandem.router.placement.policy import Placement, PlacementPolicy
from tandem.router.workers.connection import Worker
from tandem.tracing.recording import marked

_BITS = 14
_REGISTERS = 1 << _BITS
_ALPHA = 0.7213 / (1 + 1.079 / _REGISTERS)
_REST = 64 - _BITS
HALF_SECONDS = 12 * 3600.0
"""Seconds of half the window; two halves are counted."""


class Sketch:
    """Estimate of the number of distinct hashes."""

    def __init__(self) -> None:
        self._registers = bytearray(_REGISTERS)

    def add(self, hashes: Iterable[bytes]) -> None:
        """Add hashes of at least 8 uniform bytes."""
        registers = self._registers
        for each in hashes:
            value = int.from_bytes(each[:8], "big")
            index, rest = value >> _REST, value & ((1 << _REST) - 1)
            rank = _REST + 1 - rest.bit_length()
            if rank > registers[index]:
                registers[index] = rank

    def joined(self, other: Sketch) -> Sketch:
        found = Sketch()
        found._registers = bytearray(map(max, self._registers, other._registers))
        return found

    def count(self) -> float:
        ranks = Counter(self._registers)
        raw = _ALPHA * _REGISTERS**2 / sum(n * 2.0**-rank for rank, n in ranks.items())
        empty = ranks[0]
        if raw <= 2.5 * _REGISTERS and empty:
            return _REGISTERS * math.log(_REGISTERS / empty)
        return raw


class HitCeiling:
    """Ceiling of the hit rate over the last 12 to 24 hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turns_at = clock() + HALF_SECONDS
        self._now, self._before = Sketch(), Sketch()
        self._asked_now = self._asked_before = 0

    def add(self, hashes: tuple[bytes, ...]) -> None:
        """Count the full blocks of a prompt, once per request."""
        self._turn()
        self._now.add(hashes)
        self._asked_now += len(hashes)

    def read(self) -> float | None:
        """Return the ceiling, 0 to 1; None before any block."""
        self._turn()
        asked = self._asked_now + self._asked_before
        if not asked:
            return None
        return max(0.0, 1 - self._now.joined(self._before).count() / asked)

    def _turn(self) -> None:
        now = self._clock()
        if now < self._turns_at:
            return
        fresh = now >= self._turns_at + HALF_SECONDS  # no request for half the window or longer
        self._before, self._asked_before = (Sketch(), 0) if fresh else (self._now, self._asked_now)
        self._now, self._asked_now = Sketch(), 0
        self._turns_at = now + HALF_SECONDS


RETRY_SECONDS = 1.0
"""Maximum seconds that a retry waits for a thread that hashes."""
COUNTED = 512
"""Blocks that the ceiling counts in one round of the loop."""


class Placing:
    """Placement of jobs: ``ready``, then ``place`` in the same round of the loop."""

    def __init__(
        self, fleet: Fleet, policy: PlacementPolicy, *, turns: Turns, cpu_pool: CpuPool
    ) -> None:
        self.turns = turns
        self.hit_ceiling = HitCeiling()
        self._fleet = fleet
        self.policy = policy
        self._cpu_pool = cpu_pool
        self._uncounted: deque[tuple[tuple[BlockHash, ...], int]] = deque()
        """Blocks to count for the ceiling, with the first index."""

    async def ready(self, job: Job) -> None:
        """Wait until the prompt is hashed and the job has a round.

        A caller's first job needs no round. Raises the error that ends the job.
        """
        takes_turn, job.takes_turn = job.takes_turn, True
        hashes_beside = True
        while True:
            raise_if_non_retryable(job)
            lacking = job.prompt.lacking(self._hashed_for(job)) if hashes_beside else {}
            if lacking:
                hashes_beside = await self._hash(job, lacking)
            elif takes_turn:
                takes_turn = False
                try:
                    async with asyncio.timeout_at(job.deadline):
                        with marked("turn"):
                            await self.turns.take()
                except TimeoutError as error:
                    raise too_late(job) from error
            else:
                return

    def place(self, job: Job, now: float) -> Placement | None:
        """Return the policy's placement, or None without a worker. ``now``: the loop's clock."""
        hashes = {
            worker.fingerprint: job.prompt.of(worker.fingerprint, worker.card.block_size)
            for worker in self._hashed_for(job)
        }
        if hashes and not job.counted:
            job.counted = True
            self._count(next(iter(hashes.values())))  # for any fingerprint of a worker
        facts = job.facts(self._fleet.hits(hashes))
        fleet = self._fleet.snapshot(now)
        if job.request.prompt_embeds is not None:
            fleet = fleet.taking_embeds()
        exclusions = job.retry_policy.exclusions
        if job.recording is not None:
            job.scene = Scene(facts, fleet)
        placement = self.policy.place(facts, fleet, exclusions)
        if placement is None and (back := self._back(job)):
            placement = self.policy.place(facts, fleet, exclusions.but_for(back))
        if placement is not None and job.num_dispatched == 0 and not facts.pooled:
            self._fleet.asked(facts, now)
        return placement

    def _hashed_for(self, job: Job) -> list[Worker]:
        """Return workers whose cache may have some of the prompt; all if tokens are sampled."""
        workers = self._fleet.pool.workers.values()
        draws = job.request.pooling is None
        return [each for each in workers if draws or each.card.prefix_caching]

    async def _hash(self, job: Job, lacking: dict[str, int]) -> bool:
        """Hash the prompt in a thread; return whether it is done.

        If all threads are busy, ``place`` hashes in the loop for a begun answer.
        """
        prompt, further = job.prompt, job.num_dispatched > 0
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(
                min(job.deadline, now + RETRY_SECONDS) if further else job.deadline
            ):
                with marked("hash"):
                    weight = prompt.weight(lacking)
                    prompt.learn(await self._cpu_pool.run(weight, prompt.compute, lacking))
        except TimeoutError as error:
            if not further or now + RETRY_SECONDS >= job.deadline:
                raise too_late(job) from error
            return False
        except RequestRefused:
            if not further:
                raise
            return False
        return True

    def _back(self, job: Job) -> set[Incarnation]:
        """Return workers that were lost during the request and are linked again."""
        known = self._fleet.pool.workers
        return {each for each, lost in job.lost.items() if known.get(each, lost) is not lost}

    def _count(self, hashes: tuple[BlockHash, ...]) -> None:
        """Count for the ceiling: some blocks now, the rest later."""
        self.hit_ceiling.add(hashes[:COUNTED])
        if len(hashes) > COUNTED:
            self._uncounted.append((hashes, COUNTED))
            if len(self._uncounted) == 1:
                asyncio.get_running_loop().call_soon(self._count_on)

    def _count_on(self) -> None:
        hashes, begin = self._uncounted.popleft()
        end = begin + COUNTED
        self.hit_ceiling.add(hashes[begin:end])
        if end < len(hashes):
            self._uncounted.appendleft((hashes, end))
        if self._uncounted:
            asyncio.get_running_loop().call_soon(self._count_on)
