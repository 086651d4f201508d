"""Quota of blocks promised at once: P's share for hand-offs, kept on the engine's side.

Two bounds: ``limit`` on blocks of hand-offs that run or are leased (``may_start`` asks; circular
waits between mixed workers end here), and ``backlog`` on all that were admitted (``admit``).
"""

from __future__ import annotations

from tandem.protocol.errors import Refusal, RefusalCode
from tandem.protocol.ids import RequestKey


class Quota:
    """Counts by key; touched by the engine's thread alone."""

    def __init__(self, num_blocks: int, share: float, backlog: float) -> None:
        self.limit = max(1, int(num_blocks * share))
        self.backlog = max(self.limit, int(self.limit * backlog))
        self._admitted: dict[RequestKey, int] = {}
        self._started: set[RequestKey] = set()
        self._short = False
        """True if a hand-off had to wait in this round: later ones must not go before it."""
        self._waiting: set[RequestKey] = set()
        """Keys that had to wait, and have not begun since."""
        self.num_admitted = 0
        """Blocks of all admitted keys."""
        self.num_started = 0
        """Blocks of those that run or are leased."""

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._admitted

    def __len__(self) -> int:
        return len(self._admitted)

    def admit(self, key: RequestKey, num_blocks: int) -> Refusal | None:
        """Count the key, or return why not."""
        if num_blocks > self.limit:
            message = f"{num_blocks} blocks; hand-offs may hold {self.limit} here in all"
            return Refusal(code=RefusalCode.NEVER_FITS, message=message)
        if self.num_admitted + num_blocks > self.backlog:
            message = f"hand-offs of {self.num_admitted} blocks are admitted, {self.backlog} may be"
            return Refusal(code=RefusalCode.CAPACITY, message=message)
        self._admitted[key] = num_blocks
        self.num_admitted += num_blocks
        return None

    def new_round(self) -> None:
        """Begin a step, in which the callers ask in order of priority."""
        self._short = False

    @property
    def is_short(self) -> bool:
        """Return whether a hand-off waits for leased blocks: optional work should take none."""
        return bool(self._waiting)

    def may_start(self, key: RequestKey) -> bool:
        """Return whether the key's blocks fit under the limit, and reserve them if so. After the
        first False of a round all others wait, so that small ones do not starve a large one."""
        if key in self._started or key not in self._admitted:
            return True
        if self._short or self.num_started + self._admitted[key] > self.limit:
            self._short = True
            self._waiting.add(key)
            return False
        self.start(key)
        return True

    def start(self, key: RequestKey) -> None:
        """Count the key's blocks as held, also without ``may_start``."""
        if key in self._admitted and key not in self._started:
            self._started.add(key)
            self._waiting.discard(key)
            self.num_started += self._admitted[key]

    def release(self, key: RequestKey) -> None:
        """Drop the key's blocks from the counts."""
        num_blocks = self._admitted.pop(key, 0)
        self.num_admitted -= num_blocks
        if key in self._started:
            self._started.discard(key)
            self.num_started -= num_blocks
        self._waiting.discard(key)
        self._short = False
