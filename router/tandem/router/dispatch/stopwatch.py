"""Times of one request as seen by its client: first token, between tokens, in all.

Runs from the arrival of the request's head: parsing and tokenizing count.
"""

from __future__ import annotations

from tandem.protocol.errors import DeadlinePassed, RequestFailed, RequestRefused
from tandem.protocol.outputs import EngineCoreOutput, PooledOutput
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.dispatch.admission import AdmissionRefused
from tandem.router.dispatch.failure import ReaderTooSlow
from tandem.router.metrics import MISTAKES, RouterMetrics
from tandem.tracing.recording import Recording

MAX_FINISHES = 16
"""Most ends of choices in a record."""


class Stopwatch:
    """Times of a request that came at ``now``: ``admitted``, ``output`` per output, ``end`` once;
    times are seconds on the loop's clock."""

    __slots__ = (
        "_first",
        "_last",
        "_metrics",
        "_num_tokens",
        "_recording",
        "_started",
        "_takes_partial",
    )

    def __init__(
        self,
        metrics: RouterMetrics,
        now: float,
        recording: Recording | None = None,
        *,
        takes_partial: bool = False,
    ) -> None:
        self._takes_partial = takes_partial
        self._metrics = metrics
        self._started = now
        self._first: float | None = None
        self._last: dict[int, float] = {}
        self._num_tokens = 0
        self._recording = recording
        metrics.request_came()

    def admitted(self, request: EngineCoreRequest) -> None:
        """Count the request's start, after its turn came."""
        self._metrics.request_started(
            num_prompt=len(request.prompt_token_ids),
            num_choices=request.params.n,
            max_tokens=request.params.max_tokens if request.pooling is None else None,
        )

    def output(self, output: EngineCoreOutput, now: float) -> None:
        """Record tokens sent to the client."""
        if self._first is None:
            self._first = now
            self._metrics.first_token(now - self._started)
        last = self._last.get(output.choice)
        if last is not None:
            self._metrics.next_token(now - last)
        self._last[output.choice] = now
        count = len(output.token_ids)
        self._num_tokens += count
        recording = self._recording
        if recording is not None:
            if recording.first_output is None:
                recording.first_output = now
            recording.num_outputs += 1  # once a token: no call for it
            recording.num_tokens += count
            if output.finish is not None and len(recording.finishes) < MAX_FINISHES:
                recording.finishes.append(str(output.finish))
        if output.num_cached_tokens is not None:
            self._cached(output.num_cached_tokens)

    def pooled(self, output: PooledOutput, now: float) -> None:
        """Record the whole answer sent to the client: no token is timed."""
        self._first = self._last[output.choice] = now
        if self._recording is not None:
            self._recording.output(0)
        self._cached(output.num_cached_tokens)

    def _cached(self, num_tokens: int) -> None:
        """Count cached prompt tokens: a job passes them on once."""
        if num_tokens:
            self._metrics.cached_tokens(num_tokens)
        if self._recording is not None:
            self._recording.num_cached += num_tokens

    def failed(self, error: RequestFailed | RequestRefused) -> None:
        """Count an early end; it may be the client's doing, and not a failure."""
        if isinstance(error, AdmissionRefused):
            return  # the queue has counted it
        if isinstance(error, ReaderTooSlow):
            self._metrics.request_cancelled()  # as for one whose socket takes nothing any more
            return
        if isinstance(error, DeadlinePassed) and self._takes_partial and self._first is not None:
            return  # answered with what there is
        if isinstance(error, RequestFailed):
            self._metrics.request_failed(str(error.cause))
        elif error.refusal.code not in MISTAKES:
            self._metrics.request_failed(str(error.refusal.code))

    def end(self, now: float) -> None:
        """Record the end of the request, answered or not."""
        if self._first is None:
            return
        last = max(self._last.values())
        self._metrics.request_ended(
            seconds=now - self._started,
            num_tokens=self._num_tokens,
            num_choices=len(self._last),
            decode_seconds=last - self._first,
        )
