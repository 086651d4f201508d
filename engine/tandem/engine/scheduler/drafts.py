"""Drafts: tokens proposed to follow the last known one of a sequence that decodes.

They are computed and checked in one row of the next step. Until its result is applied the sequence
is in no other step, since the number of accepted drafts is unknown. The planner knows of it by
``plan_limit`` alone, so that a step without drafts runs unchanged code.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tandem.engine.cache.manager import KVCacheManager
from tandem.engine.request import Request, RequestState
from tandem.engine.step import SeqId

MOST_DRAFTS = 128
"""Drafts in one step, forced ones included: each has a row of logits, and so many positions' logits
exist at a time if a prompt is scored."""


class Held(NamedTuple):
    """A sequence whose drafts go with the step that is being planned."""

    request: Request
    draft_token_ids: tuple[int, ...]
    new_block_ids: tuple[int, ...]


class Drafts:
    """Drafts that are proposed and not yet planned."""

    def __init__(self) -> None:
        self._proposed: dict[SeqId, tuple[Request, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        """Return the number of sequences with drafts."""
        return len(self._proposed)

    def propose(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Have the next step check ``token_ids``, at least one, after the last known token.

        Return False and do nothing unless the sequence decodes, no step in flight samples for it,
        it does not end sooner, and nothing constrains its tokens. A mask is of one position, and a
        logits processor knows one.
        """
        known = len(request.token_ids)
        decodes = request.state is RequestState.RUNNING and request.num_generated > 0
        settled = request.num_pending == 0 and known - request.num_computed == 1
        tokens = tuple(token_ids[: request.max_len - known - 1])
        free = draws_several(request) and request.seq not in self._proposed
        if not (decodes and settled and free and tokens):
            return False
        request.plan_limit = 0
        self._proposed[request.seq] = request, tokens
        return True

    def drop(self, request: Request) -> None:
        """Forget the drafts of a sequence that ends or loses its blocks."""
        if self._proposed.pop(request.seq, None) is not None:
            release(request)

    def take(self, manager: KVCacheManager, budget: int) -> Iterator[Held]:
        """Yield drafts of the coming step, with blocks for all their tokens, ``budget`` tokens at
        most. Drafts take no sequence's blocks: those without room are dropped, and planned as
        usual."""
        left = MOST_DRAFTS
        for request, tokens in list(self._proposed.values()):
            known = len(request.token_ids)
            tokens = tokens[: max(0, min(budget - 1, left))]
            added = manager.grow(request, known + len(tokens)) if tokens else None
            if added is None:
                self.drop(request)
                continue
            budget -= 1 + len(tokens)
            left -= len(tokens)
            yield Held(request, tokens, added)

    def planned(self, held: Sequence[Held]) -> Iterator[Held]:
        """Yield the drafts of ``held`` that still have their blocks; they are no longer
        proposed."""
        for each in held:
            if self._proposed.pop(each.request.seq, None) is not None:
                yield each


def draws_several(request: Request) -> bool:
    """Return whether a row of the request may sample at several positions. A grammar's mask is of
    one position, and a logits processor knows one."""
    return request.constraint is None and not request.group.source.params.extra_args


def release(request: Request) -> None:
    """Plan the sequence as usual again."""
    request.plan_limit = request.max_len
