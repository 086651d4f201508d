"""Proposes drafts by prompt lookup: the tokens that followed the same n-gram earlier in a sequence.

Source: Saxena, prompt lookup decoding (2023). A sequence whose drafts cost more than they save
makes none for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.engine.config.speculative import MOST_DRAFTED_SEQS, NgramLookup
from tandem.engine.request import Request
from tandem.engine.scheduler.constrained import Drafts, draws_several
from tandem.engine.step import SeqId

COST = 1.1
"""Cost of a row's step with drafts in steps without, on an idle device."""
OVERLAPPED_COST = 2.0
"""The same if another step is launched before its result: the row is not in that one."""
TOKENS_OF_WEIGHTS = 256
"""Tokens of a step that are computed in the time in which 16-bit weights are read: each draft makes
the step of all rows so much longer."""
WAIT_SHARE = 0.2
"""Share of the sequences that have drafts in flight from which no step is launched before their
result: the time between two steps costs less than their absence."""
PAUSE, LONGEST_PAUSE = 16, 512
"""Tokens without drafts after drafts that cost more than they saved. Each pause is twice as long as
the one before it, until drafts save again."""
FIRST_ACCEPTED = 1.0
"""Accepted drafts that are assumed before the first result."""
_WEIGHT = 0.5
"""Weight of the latest result in the mean of accepted drafts."""


def continuation(tokens: NDArray[np.int32], lookup: NgramLookup, count: int) -> NDArray[np.int32]:
    """Return up to ``count`` tokens that followed the longest last n-gram of ``tokens`` earlier;
    none if it is new.

    Of several places, it is the last one that so many tokens follow, else the first.
    """
    known, last = len(tokens), tokens[-1:]
    ends = np.flatnonzero(tokens[:-1] == last)
    found = ends[:0]
    for size in range(1, lookup.prompt_lookup_max + 1):
        if size >= lookup.prompt_lookup_min and ends.size:
            found = ends
        if not ends.size:
            break
        ends = ends[ends >= size]
        ends = ends[tokens[ends - size] == tokens[known - 1 - size]] if size < known else ends[:0]
    if not found.size:
        return tokens[:0]
    whole = found[found + count < known]
    start = int(whole[-1] if whole.size else found[0]) + 1
    return tokens[start : start + count]


class _History:
    """Tokens of one sequence, and results of its drafts."""

    __slots__ = ("_tokens", "accepted", "drafted_at", "length", "pause", "resumes_at")

    def __init__(self) -> None:
        self._tokens: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self.length = 0
        self.accepted = FIRST_ACCEPTED
        """Running mean of accepted drafts."""
        self.drafted_at: int | None = None
        """Tokens before the drafts whose result is not noted yet."""
        self.resumes_at = 0
        """Known tokens from which drafts are proposed."""
        self.pause = PAUSE

    def upto(self, token_ids: Sequence[int]) -> NDArray[np.int32]:
        """Return ``token_ids`` as an array, of which only new ones are copied."""
        known = len(token_ids)
        if known > len(self._tokens):
            wider = np.empty(2 * known, dtype=np.int32)
            wider[: self.length] = self._tokens[: self.length]
            self._tokens = wider
        self._tokens[self.length : known] = token_ids[self.length :]
        self.length = known
        return self._tokens[:known]

    def note(self, accepted: int, cost: float) -> None:
        """Note the result of drafts; pause them if they yield fewer tokens than ``cost`` steps."""
        self.accepted += _WEIGHT * (max(0, accepted) - self.accepted)
        if 1 + self.accepted < cost:
            self.resumes_at = self.length + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.accepted = cost - 1
        elif accepted > cost:
            self.pause = PAUSE


class NgramDrafter:
    """Proposes before each step, also after a token that a step in flight will sample."""

    def __init__(self, lookup: NgramLookup, drafts: Drafts) -> None:
        self._lookup, self._drafts = lookup, drafts
        self._histories: dict[SeqId, _History] = {}

    def waits(self, running: Sequence[Request]) -> bool:
        """Return whether to plan nothing before the results of drafts in flight are known."""
        drafted = sum(
            1
            for each in running
            if not each.plan_limit and each.num_output_placeholders and each.constraint is None
        )
        return drafted > WAIT_SHARE * len(running)

    def propose(self, running: Sequence[Request]) -> None:
        """Propose drafts for the coming step, for sequences without drafts in flight."""
        if len(running) > MOST_DRAFTED_SEQS:
            return
        overlaps = any(each.num_output_placeholders for each in running)
        cost = OVERLAPPED_COST if overlaps else COST
        cost += len(running) * self._lookup.num_speculative_tokens / TOKENS_OF_WEIGHTS
        for request in running:
            if request.num_generated and request.plan_limit and _takes_drafts(request):
                self._visit(request, cost)
        if len(self._histories) > len(running):
            here = {request.seq for request in running}
            self._histories = {s: each for s, each in self._histories.items() if s in here}

    def _visit(self, request: Request, cost: float) -> None:
        history = self._histories.get(request.seq)
        if history is None:
            history = self._histories[request.seq] = _History()
        known, pending = len(request.token_ids), request.num_output_placeholders
        if history.drafted_at is not None:
            accepted, history.drafted_at = known - history.drafted_at - 1, None
            history.note(accepted, cost)
        if known < history.resumes_at or request.num_tokens + 1 >= request.max_len:
            return
        count = pending + self._lookup.num_speculative_tokens
        found = continuation(history.upto(request.token_ids), self._lookup, count)
        # The first of them stand for tokens in flight; if these differ, the drafts are rejected.
        if self._drafts.propose(request, found[pending:].tolist()):
            history.drafted_at = request.num_tokens


def _takes_drafts(request: Request) -> bool:
    """Return whether a sequence may have drafts. Ids of a prompt of vectors are placeholders."""
    return draws_several(request) and request.group.source.prompt_embeds is None
