"""Where a job's next attempt goes, and when that is asked: in the loop, which it must not hold.

Placement itself is pure and quick. What it goes by takes long for a long prompt: hashes under
fingerprints other than the caller's are computed beside the loop, and what the ceiling counts is
counted in many rounds. Jobs that would be placed together (their worker was lost, one came up, many
were let in) are placed in a round each. The dispatcher alone calls this.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tandem.llm.beside import Beside
from tandem.protocol.errors import RequestRefused
from tandem.protocol.ids import BlockHash, Incarnation
from tandem.protocol.recording import marked
from tandem.router.admission.turns import Turns
from tandem.router.dispatch.fleet import Fleet
from tandem.router.dispatch.job import Job
from tandem.router.dispatch.recorder import Scene
from tandem.router.dispatch.verdicts import raise_if_non_retryable, too_late
from tandem.router.hit_ceiling import HitCeiling
from tandem.router.placement.base import Placement, PlacementPolicy
from tandem.router.workers.worker import Worker

RETRY_SECONDS = 1.0
"""For which a further attempt waits for a thread that hashes: its client has waited already."""
COUNTED = 512
"""Blocks that the ceiling counts in one round of the loop: a third of a millisecond."""


class Placing:
    """``ready``, and ``place`` in the same round of the loop."""

    def __init__(
        self, fleet: Fleet, policy: PlacementPolicy, *, turns: Turns, beside: Beside
    ) -> None:
        self.turns = turns
        self.hit_ceiling = HitCeiling()
        self._fleet = fleet
        self.policy = policy
        self._beside = beside
        self._uncounted: deque[tuple[tuple[BlockHash, ...], int]] = deque()
        """Blocks that the ceiling has yet to count, from which on."""

    async def ready(self, job: Job) -> None:
        """Wait until the job may be placed: its prompt is hashed for whoever is up, and the round
        is its own, unless it comes as the caller's first and has waited for nothing.

        Raises the error with which it ends, if nothing more may be tried by then.
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
        """Ask the policy; None where nobody can take it. ``now`` is the loop's clock."""
        hashes = {
            worker.fingerprint: job.prompt.of(worker.fingerprint, worker.card.block_size)
            for worker in self._hashed_for(job)
        }
        if hashes and not job.counted:
            job.counted = True
            self._count(next(iter(hashes.values())))  # by one of the fingerprints that are up
        facts = job.facts(self._fleet.hits(hashes))
        fleet = self._fleet.snapshot(now)
        if job.request.prompt_embeds is not None:
            fleet = fleet.taking_embeds()
        exclusions = job.ladder.exclusions
        if job.recording is not None:
            job.scene = Scene(facts, fleet)
        placement = self.policy.place(facts, fleet, now, exclusions)
        if placement is None and (back := self._back(job)):
            placement = self.policy.place(facts, fleet, now, exclusions.but_for(back))
        if placement is not None and job.num_dispatched == 0 and not facts.pooled:
            self._fleet.asked(facts, now)
        return placement

    def _hashed_for(self, job: Job) -> list[Worker]:
        """Workers whose cache may have some of the prompt. All of them where tokens are drawn: then
        the ceiling counts what a cache would have found."""
        workers = self._fleet.pool.workers.values()
        draws = job.request.pooling is None
        return [each for each in workers if draws or each.card.prefix_caching]

    async def _hash(self, job: Job, lacking: dict[str, int]) -> bool:
        """Whether it is done. Where all threads are taken an answer that has begun does not end for
        it: ``place`` hashes in the loop then."""
        prompt, further = job.prompt, job.num_dispatched > 0
        now = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(
                min(job.deadline, now + RETRY_SECONDS) if further else job.deadline
            ):
                with marked("hash"):
                    weight = prompt.weight(lacking)
                    prompt.learn(await self._beside.run(weight, prompt.compute, lacking))
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
        """Workers that were lost under the request and have another link since."""
        known = self._fleet.pool.workers
        return {each for each, lost in job.lost.items() if known.get(each, lost) is not lost}

    def _count(self, hashes: tuple[BlockHash, ...]) -> None:
        """For the ceiling: the first blocks now, and what is left in rounds to come."""
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
