"""A drafter for tests: proposes tokens through the planner's own field, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.request import Request

Guess = Callable[[Request], Sequence[int]]
"""What might follow a sequence's known tokens."""


def guesses(outputs: dict[str, list[int]], *, most: int, wrong_every: int, vocab: int) -> Guess:
    """Up to ``most`` of the tokens that follow in ``outputs`` (of choice 0, by request); each whose
    position is a multiple of ``wrong_every`` is another token."""

    def guess(request: Request) -> list[int]:
        start = request.num_output
        right = outputs[request.request_id][start : start + most]
        return [
            (token + 1) % vocab if at % wrong_every == 0 else token
            for at, token in enumerate(right, start)
        ]

    return guess


def draft(core: EngineCore, guess: Guess) -> int:
    """Propose for every sequence that decodes, before the next step; for how many it was taken.
    One whose token is on its way is held until it is known."""
    taken = 0
    roster = core.scheduler.roster
    for request in roster.running:
        if request.num_generated == 0 or request.constraint is not None:
            continue
        if request.num_pending:
            request.plan_limit = 0
            continue
        if not roster.drafts.propose(request, guess(request)):
            request.plan_limit = request.max_len
        else:
            taken += 1
    return taken
