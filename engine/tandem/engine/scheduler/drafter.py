"""Chooses the rows that verify drafts, which the ranks propose.

A sequence whose drafts cost more than they save has none for a while.
"""

from __future__ import annotations

from tandem.engine.config.speculative import MOST_DRAFTED_SEQS
from tandem.engine.request import Request
from tandem.engine.scheduler.constrained import draws_several
from tandem.engine.step import SeqId

COST = 1.1
"""Cost of a row's step with drafts in steps without."""
TOKENS_OF_WEIGHTS = 256
"""Tokens of a step that are computed in the time in which 16-bit weights are read: each draft makes
the step of all rows so much longer."""
PAUSE, LONGEST_PAUSE = 16, 512
"""Steps without drafts after drafts that cost more than they saved. Each pause is twice as long as
the one before it, until drafts save again. It ends at a multiple of its length, so that sequences
try again in the same steps, whose cost they share."""
FIRST_ACCEPTED = 1.0
"""Accepted drafts that are assumed before the first result."""
_WEIGHT = 0.5
"""Weight of the latest result in the mean of accepted drafts."""


class _Results:
    """Results of one sequence's drafts."""

    __slots__ = ("accepted", "pause", "resumes_at")

    def __init__(self) -> None:
        self.accepted = FIRST_ACCEPTED
        """Running mean of accepted drafts."""
        self.resumes_at = 0
        """Step from which drafts are verified."""
        self.pause = PAUSE

    def note(self, accepted: int, step: int, cost: float) -> None:
        """Note accepted drafts; pause if they yield fewer tokens than ``cost`` steps."""
        self.accepted += _WEIGHT * (accepted - self.accepted)
        if 1 + self.accepted < cost:
            self.resumes_at = (step // self.pause + 1) * self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.accepted = cost - 1
        elif accepted > cost:
            self.pause = PAUSE


class Drafter:
    """Policy of one engine."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self._most = num_speculative_tokens
        self._results: dict[SeqId, _Results] = {}
        self._first = _Results()
        """Results of the first drafts of sequences."""
        self._cost = COST
        self._step = 0

    def begin_step(self, num_rows: int) -> int:
        """Prepare for a step of ``num_rows`` decodes. Return the most drafts of a row."""
        self._step += 1
        self._cost = COST + num_rows * self._most / TOKENS_OF_WEIGHTS
        if len(self._results) > 2 * MOST_DRAFTED_SEQS:
            self._results.clear()
        return self._most if num_rows <= MOST_DRAFTED_SEQS else 0

    def is_due(self, request: Request) -> bool:
        """Return whether the drafts that were last proposed for a sequence are verified next."""
        if not (request.num_proposed and request.num_generated and _takes_drafts(request)):
            return False
        return self._step >= self._results.get(request.seq, self._first).resumes_at

    def note(self, request: Request, accepted: int) -> None:
        """Note the result of a row with drafts, unless a pause began while it was in flight."""
        results = self._results.get(request.seq)
        if results is None:
            results = self._results[request.seq] = _Results()
            self._note(self._first, accepted)
        self._note(results, accepted)

    def _note(self, results: _Results, accepted: int) -> None:
        if self._step >= results.resumes_at:
            results.note(accepted, self._step, self._cost)


def _takes_drafts(request: Request) -> bool:
    """Return whether a sequence may have drafts. Ids of a prompt of vectors are placeholders."""
    return draws_several(request) and request.group.source.prompt_embeds is None
