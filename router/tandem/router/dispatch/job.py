"""One request in progress: its log, its retry policy, its deadline, and its attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from tandem.protocol.card import WorkerRole
from tandem.protocol.context import Route
from tandem.protocol.errors import FailCause, TandemError
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.kv import MAX_FIRST_BYTES, first_bytes
from tandem.protocol.outputs import EngineCoreOutput, FinishReason
from tandem.protocol.requests import (
    Consume,
    EngineCoreRequest,
    Produce,
    Pull,
)
from tandem.protocol.sampling import ALL_LOGPROBS, SamplingParams
from tandem.protocol.timeline import Watch
from tandem.router.dispatch.attempt import Attempt, Leg
from tandem.router.dispatch.retry_policy import AttemptFailure, RetryPolicy
from tandem.router.metrics import RouterMetrics
from tandem.router.placement.policy import Placement
from tandem.router.placement.snapshot import FleetSnapshot, PromptFacts
from tandem.router.workers.connection import Worker
from tandem.tracing.recording import Recording


@dataclass(frozen=True, slots=True)
class Scene:
    """Input of a placement."""

    facts: PromptFacts
    fleet: FleetSnapshot


class Contradiction(TandemError):
    """Another token was written at this position."""


class Gap(TandemError):
    """The position or choice is impossible: the worker is at fault."""


@dataclass(slots=True)
class _Choice:
    tokens: list[int]
    finish: FinishReason | None
    cut: bool = False
    """Whether its reader ended it, and no worker has reported its end."""


class Ledger:
    """Emitted tokens of a request over all its attempts."""

    def __init__(
        self,
        num_choices: int,
        emitted: Sequence[Sequence[int]] = (),
        finished: Sequence[int] = (),
    ) -> None:
        self._choices = [
            _Choice(
                list(emitted[choice]) if choice < len(emitted) else [],
                FinishReason.STOP if choice in finished else None,
            )
            for choice in range(num_choices)
        ]
        self._open = num_choices - len(self.finished_choices)
        self._has_prompt_logprobs = False
        self.num_repeated = 0
        """Repeated tokens that agreed."""

    @property
    def done(self) -> bool:
        return self._open == 0

    @property
    def reported(self) -> bool:
        """Return whether workers have reported every choice's end."""
        return self._open == 0 and not any(choice.cut for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Return the emitted tokens of all choices."""
        count = 0
        for choice in self._choices:
            count += len(choice.tokens)
        return count

    @property
    def emitted(self) -> tuple[tuple[int, ...], ...]:
        """Return tokens per choice for a further attempt; () if there are none."""
        if not self.num_tokens:
            return ()
        return tuple(tuple(choice.tokens) for choice in self._choices)

    @property
    def finished_choices(self) -> tuple[int, ...]:
        """Return choices that must not be continued."""
        return tuple(
            index for index, choice in enumerate(self._choices) if choice.finish is not None
        )

    def length(self, choice: int) -> int:
        return len(self._choices[choice].tokens)

    def write(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Add the new part of ``output`` and return it, or None if nothing is new.

        Raises Contradiction if a token differs, Gap for an impossible position or choice. Tokens
        after an end that its reader found are ignored.
        """
        if not 0 <= output.choice < len(self._choices):
            raise Gap(f"choice {output.choice} of {len(self._choices)}")
        choice = self._choices[output.choice]
        tokens = choice.tokens
        if output.position == len(tokens) and choice.finish is None:  # the usual case
            tokens.extend(output.token_ids)
            return self._finish(choice, output)
        if choice.cut:
            choice.cut = output.finish is None
            return None
        return self._overlap(choice, output)

    def end(self, choice: int) -> None:
        """End a choice whose reader has found its end."""
        ended = self._choices[choice]
        if ended.finish is None:
            ended.finish, ended.cut = FinishReason.STOP, True
            self._open -= 1

    def answered(self) -> None:
        """Mark the choice of a request without tokens as answered."""
        (choice,) = self._choices
        choice.finish = FinishReason.STOP
        self._open = 0

    def _overlap(self, choice: _Choice, output: EngineCoreOutput) -> EngineCoreOutput | None:
        tokens, start = choice.tokens, output.position
        if not 0 <= start <= len(tokens):
            raise Gap(f"choice {output.choice}: position {start} after {len(tokens)} tokens")
        known = tokens[start : start + len(output.token_ids)]
        if tuple(known) != output.token_ids[: len(known)]:
            raise Contradiction(
                f"choice {output.choice}, position {start}: "
                f"{list(output.token_ids[: len(known)])} after {known}"
            )
        self.num_repeated += len(known)
        fresh = output.token_ids[len(known) :]
        if choice.finish is not None:
            if fresh:
                raise Gap(f"choice {output.choice}: {len(fresh)} tokens after its end")
            return None
        ends = output.finish is not None and start + len(output.token_ids) == len(tokens)
        if not (fresh or ends or (output.prompt_logprobs and not self._has_prompt_logprobs)):
            return None
        tokens.extend(fresh)
        return self._finish(choice, _without(output, len(known)))

    def _finish(self, choice: _Choice, output: EngineCoreOutput) -> EngineCoreOutput:
        if output.prompt_logprobs is not None:
            self._has_prompt_logprobs = True
        if output.finish is not None:
            choice.finish = output.finish
            self._open -= 1
        return output


def _without(output: EngineCoreOutput, count: int) -> EngineCoreOutput:
    return EngineCoreOutput(
        request=output.request,
        attempt=output.attempt,
        choice=output.choice,
        position=output.position + count,
        token_ids=output.token_ids[count:],
        finish=output.finish,
        stop_token=output.stop_token,
        logprobs=None if output.logprobs is None else output.logprobs[count:],
        prompt_logprobs=output.prompt_logprobs,
        num_cached_tokens=output.num_cached_tokens,
    )


FIRST_PAUSE = 1.0
"""Seconds until the first further attempt; each pause is twice the last."""


class Patience:
    """Wait of one request without a possible worker."""

    __slots__ = ("_ask_at", "_pause", "ends")

    def __init__(self) -> None:
        self.over()

    def over(self) -> None:
        """Reset after a worker has worked for the request."""
        self.ends = math.inf
        self._ask_at = math.inf
        self._pause = FIRST_PAUSE

    def begin(self, now: float, seconds: float) -> None:
        """Begin a wait without workers. Repeated refusals do not extend it."""
        if self.ends == math.inf:
            self.ends = now + seconds
            self._ask_at = now + self._pause

    def nap(self, now: float) -> float:
        """Return the seconds until the next action."""
        return max(0.0, min(self.ends, self._ask_at) - now)

    def asks_again(self, now: float) -> bool:
        """Return whether to retry; True once for each pause."""
        if now < self._ask_at:
            return False
        self._pause *= 2
        self._ask_at = now + self._pause
        return True


Hashes = tuple[BlockHash, ...]

_TOKEN = 2
"""Cost of hashing a token, for ``CpuPool.run``."""
_VECTOR_BYTES = 64
"""Bytes of embeddings for the cost of one item."""


class PromptHashes:
    """Hashes of one request. ``compute`` may run in any thread."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self._request = request
        self._known: dict[str, Hashes] = {}

    def of(self, fingerprint: str, block_size: int) -> Hashes:
        """Return the hashes of the prompt's full blocks."""
        known = self._find(fingerprint, block_size)
        if known is None:
            known = self._known[fingerprint] = self._compute(fingerprint, block_size)
        return known

    def lacking(self, workers: Iterable[Worker]) -> dict[str, int]:
        """Return fingerprints without hashes, with their block sizes."""
        return {
            worker.fingerprint: worker.card.block_size
            for worker in workers
            if self._find(worker.fingerprint, worker.card.block_size) is None
        }

    def weight(self, lacking: dict[str, int]) -> int:
        """Return the cost of ``compute``, for ``CpuPool.run``."""
        content = self._request.content
        vectors = 0 if content is None else content.nbytes // _VECTOR_BYTES
        return len(lacking) * (_TOKEN * len(self._request.prompt_token_ids) + vectors)

    def compute(self, lacking: dict[str, int]) -> dict[str, Hashes]:
        return {name: self._compute(name, block_size) for name, block_size in lacking.items()}

    def learn(self, computed: dict[str, Hashes]) -> None:
        self._known |= computed

    def _root(self, fingerprint: str, block_size: int) -> BlockHash:
        request = self._request
        return root_hash(
            fingerprint=fingerprint,
            block_size=block_size,
            adapter=request.adapter,
            salt=request.cache_salt,
        )

    def _compute(self, fingerprint: str, block_size: int) -> Hashes:
        request, root = self._request, self._root(fingerprint, block_size)
        return tuple(hash_blocks(root, request.prompt_token_ids, block_size, request.content))

    def _find(self, fingerprint: str, block_size: int) -> Hashes | None:
        """Return known hashes, or the caller's for the same fingerprint."""
        known = self._known.get(fingerprint)
        if known is not None:
            return known
        request = self._request
        given, prompt = request.block_hashes, request.prompt_token_ids
        if not given or len(given) != len(prompt) // block_size:
            return None
        root = self._root(fingerprint, block_size)
        if [given[0]] != hash_blocks(root, prompt[:block_size], block_size, request.content):
            return None
        self._known[fingerprint] = given
        return given


class Job:
    """State of one ``stream``."""

    def __init__(
        self,
        request: EngineCoreRequest,
        *,
        name: str,
        deadline: float,
        max_attempts: int,
        metrics: RouterMetrics,
        route: Route | None = None,
        recording: Recording | None = None,
    ) -> None:
        self.metrics = metrics
        self.route = route
        self.recording = recording
        self.observers: list[Observer] = []
        self.scene: Scene | None = None
        """Last input of placement, if kept."""
        self.request = request
        """Request of the caller, with a seed."""
        self.name = name
        """Id for workers, unique in this process."""
        self.deadline = deadline
        self.ledger = Ledger(request.params.n, request.emitted, request.finished_choices)
        self.retry_policy = RetryPolicy(max_attempts)
        self.patience = Patience()
        self.attempt: Attempt | None = None
        self.placement: Placement | None = None
        self.fingerprint: str | None = None
        """Compatibility of workers that may continue the emitted tokens."""
        self.lost: dict[Incarnation, Worker] = {}
        """Workers whose link broke during an attempt."""
        self.expired = False
        self.given_up = False
        """Whether its client leaves too much unread."""
        self.admitted = False
        self.tells_accepted = False
        """Whether the caller expects to learn that the request waits."""
        self.cached: int | None = None
        """First reported number of cached prompt tokens."""
        self._cached_passed_on = False
        self.takes_turn = False
        """Whether other jobs may be placed at the same moment."""
        self.counted = False
        """Whether the ceiling has counted its prompt."""
        self.num_dispatched = 0
        self._num_tokens_before = 0
        self.hits: Mapping[Incarnation, int] = {}
        """Cached tokens per worker, at its last placement."""
        self.prompt = PromptHashes(request)
        self.num_prompt = len(request.prompt_token_ids)

    def expire(self) -> None:
        """Mark the deadline as passed; received events may still be read."""
        self.expired = True
        if self.attempt is not None:
            self.attempt.wake()

    def is_taken(self, attempt: Attempt, now: float) -> bool:
        """Return whether to inform the caller that the request waits at its workers.

        True at most once, never after the first token. Requests with a grammar need more than
        acceptance.
        """
        accepted = attempt.is_accepted and self.request.params.structured_outputs is None
        taken = not self.ledger.num_tokens and (accepted or attempt.had_time(now))
        self.tells_accepted = not (taken or self.ledger.num_tokens)
        return taken

    def failed(self, failure: AttemptFailure, workers: Sequence[Worker]) -> None:
        """Record the end of an attempt, and exclude unusable workers."""
        brought_on = self.ledger.num_tokens > self._num_tokens_before
        self.retry_policy.record(replace(failure, brought_on=brought_on))
        if failure.did_work:
            self.patience.over()
        if failure.cause is FailCause.WORKER_LOST:
            self.lost |= {w.incarnation: w for w in workers if w.incarnation == failure.worker}

    def write(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        """Add as ``Ledger.write``, with the first number of cached tokens only."""
        if self.cached is None:
            self.cached = output.num_cached_tokens
        written = self.ledger.write(output)
        if written is None:
            return None
        cached = None if self._cached_passed_on else self.cached
        self._cached_passed_on |= cached is not None
        if written.num_cached_tokens != cached:
            written = msgspec.structs.replace(written, num_cached_tokens=cached)
        return written

    def facts(self, hits: dict[Incarnation, int]) -> PromptFacts:
        self.hits = hits
        params, emitted = self.request.params, self.ledger.num_tokens
        longest = max(map(self.ledger.length, range(params.n)))
        resumed_fork = params.n > 1 and emitted > 0
        left = None if params.max_tokens is None else params.max_tokens - self.ledger.length(0)
        return PromptFacts(
            num_tokens=self.num_prompt + longest,
            max_new_tokens=left,
            num_choices=params.n,
            whole=resumed_fork or params.prompt_logprobs is not None or _first_is_long(params),
            one_token=left == 1 and not resumed_fork,
            pooled=self.request.pooling is not None,
            query_key=_query_key(self.request),
            fingerprint=self.fingerprint,
            hits=hits,
            shape=None if self.route is None else self.route.shape,
            revisions={}
            if self.route is None
            else {
                role: revision
                for role in WorkerRole
                if (revision := self.route.revision_of(role)) is not None
            },
        )

    def legs(
        self,
        router: bytes,
        workers: Sequence[Worker],
        now: float,
        watch: Watch | None = None,
    ) -> list[tuple[Worker, EngineCoreRequest]]:
        """Return the workers with their requests; of two, the prefill worker first.

        ``now`` is the loop's time.
        """
        number = self.num_dispatched
        self.num_dispatched += 1
        self._num_tokens_before = self.ledger.num_tokens
        base = msgspec.structs.replace(
            self.request,
            key=RequestKey(router, self.name, number),
            emitted=self.ledger.emitted,
            finished_choices=self.ledger.finished_choices,
            budget_ms=max(1, int((self.deadline - now) * 1000)),
            max_model_len=workers[-1].card.max_model_len,
            kv=None,
            watch=watch,
        )
        computing = msgspec.structs.replace(base, pull=_pull_of(self.placement))
        if len(workers) == 1:
            return [(workers[0], self._for(workers[0], computing, None))]
        prefill, decode = workers
        produce = Produce(consumer=decode.incarnation)
        consume = Consume(producer=prefill.incarnation)
        return [
            (prefill, self._for(prefill, computing, produce)),
            (decode, self._for(decode, base, consume)),
        ]

    def _for(
        self, worker: Worker, base: EngineCoreRequest, kv: Produce | Consume | None
    ) -> EngineCoreRequest:
        """Return the request with the hashes of this worker's block size."""
        hashes: tuple[BlockHash, ...] = ()
        if worker.card.prefix_caching or kv is not None:
            hashes = self.prompt.of(worker.fingerprint, worker.card.block_size)
        return msgspec.structs.replace(base, block_hashes=hashes, kv=kv)


class Observer:
    """Observer of a request's attempts. A method that is not overridden does nothing."""

    __slots__ = ()

    def sent(self, job: Job, attempt: Attempt) -> None:
        """Handle an attempt before it is sent to its workers."""

    def answered(self, job: Job, attempt: Attempt, leg: Leg) -> None:
        """Handle a leg's first output."""

    def ended(self, job: Job, attempt: Attempt, failure: AttemptFailure | None, now: float) -> None:
        """Handle the end of an attempt; ``now`` is the loop's time."""


def _first_is_long(params: SamplingParams) -> bool:
    """Return whether the first tokens are too long for a hand-off."""
    most = params.logprobs
    if most == ALL_LOGPROBS:  # the caller does not know the vocabulary
        return True
    return most is not None and first_bytes(params.n, most) > MAX_FIRST_BYTES


def _pull_of(placement: Placement | None) -> Pull | None:
    """Return the pull for the worker that computes the prompt."""
    plan = None if placement is None else placement.pull
    if plan is None:
        return None
    have, budget_ms = plan.num_tokens - plan.tokens, round(plan.budget_s * 1000)
    return Pull(plan.holder, plan.num_tokens, budget_ms, have)


def _query_key(request: EngineCoreRequest) -> str | None:
    """Return the key of the query that the request keeps or uses."""
    if request.pooling is None or request.pooling.late_interaction is None:
        return None
    return request.pooling.late_interaction.query_key
