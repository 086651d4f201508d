"""A drafter for tests: proposes tokens through the planner's own field, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.core.engine_core import EngineCore
from tandem.engine.request import Request, RequestState

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


class Drafter:
    """Proposes for every sequence that decodes, before a step: for every other one after a token
    that is in flight, for the others once that is known."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._held: list[Request] = []
        self.taken = 0
        """How many proposals were."""

    def propose(self, guess: Guess | None) -> None:
        """Before the coming step; without a guess whoever was held is let go."""
        request_table = self._core.scheduler.request_table
        known = [each for each in self._held if not self._waits(each)]
        self._held = [each for each in self._held if self._waits(each)]
        for request in known:
            request.plan_limit = request.max_len
        if guess is None:
            return
        for request in request_table.running:
            if request.num_generated == 0 or request.constraint is not None:
                continue
            pending = request.num_output_placeholders
            if not pending or (pending == 1 and request.seq % 2):
                tokens = guess(request)[pending:]
                self.taken += request_table.drafts.propose(request, tokens)
            elif request.plan_limit:
                request.plan_limit = 0
                self._held.append(request)

    def _waits(self, request: Request) -> bool:
        return request.num_output_placeholders > 0 and request.state is RequestState.RUNNING
