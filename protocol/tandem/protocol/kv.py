"""Types that an engine and a hand-off exchange about a request's KV."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from tandem.protocol.errors import FailCause
from tandem.protocol.ids import RequestKey
from tandem.protocol.messages import Count
from tandem.protocol.outputs import TokenLogprobs
from tandem.protocol.timeline import Note


class Fence(Protocol):
    """Completion of a step's KV writes on all ranks, visible to the host."""

    def done(self) -> bool:
        """Return whether every write has completed. Never blocks."""
        ...


BlockTables = tuple[tuple[int, ...], ...]
"""Block tables of one sequence by group of the layout, in token order. Entries before a window are
negative. A state has one block."""


def frozen(tables: Iterable[Iterable[int]]) -> BlockTables:
    """Return a copy of tables that later growth does not change."""
    return tuple(map(tuple, tables))


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """First token of one choice, drawn by the prefill worker."""

    choice: Annotated[int, Meta(ge=0, le=1 << 24)]
    token_id: Count
    logprobs: TokenLogprobs | None = None


MAX_FIRST_BYTES = 1 << 19
"""Maximum bytes of the first tokens of all choices in a hand-off."""
_BYTES_OF_A_LOGPROB = 16
"""Maximum bytes of an id and its log-probability in a message."""


def first_bytes(n: int, logprobs: int) -> int:
    """Return the maximum bytes of the first tokens of ``n`` choices."""
    return n * (logprobs + 1) * _BYTES_OF_A_LOGPROB


@dataclass(frozen=True, slots=True)
class Released:
    """The hand-off no longer uses the key's blocks; the engine may reuse them."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Ready:
    """The key's KV is being computed elsewhere: reserve blocks for it. Once per key."""

    key: RequestKey
    num_tokens: int
    """Tokens from the start of the prompt whose KV will be delivered."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The key's remote KV is committed: its blocks may be used and cached."""

    key: RequestKey
    first: tuple[FirstToken, ...]
    """Token 1 of each choice, as the producer drew it; empty if it is to be drawn here."""
    usable: bool = True
    """False: token 1 ended every choice, so the blocks contain nothing to use or cache."""
    blocks_free: bool = True
    """False (only with ``usable=False``): writes may still come; a ``Released`` follows."""
    notes: tuple[Note, ...] = ()
    """Times of the load's parts, on this process's monotonic clock."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The hand-off failed; the key's blocks contain nothing to use or cache.

    Also reported for a producer's revoked export.
    """

    key: RequestKey
    cause: FailCause
    message: str
    blocks_free: bool = True
    """False if writes may still arrive; a ``Released`` follows."""
