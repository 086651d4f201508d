"""State × event of both machines: the expected events and the possible next states.

``producer.step`` and ``consumer.step`` only count a pair that is not here. docs/handoff.md is
made from this module (``python -m tandem.kvtransfer.handoff.document``), and the model checker
holds every step to ``next``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple


class PState(StrEnum):
    """An export of P."""

    EXPECTED = "expected"
    """The consumer's OPEN came before the request was admitted."""
    COMPUTING = "computing"
    LEASED = "leased"
    """Everything is computed and promised, token 1 is known."""
    GONE = "gone"
    """Nothing is promised; remembered to answer."""
    CLOSED = "closed"
    """Committed; remembered to answer."""


class PEvent(StrEnum):
    """Events of an export."""

    ADMIT = "admit"
    REFUSE = "refuse"
    BEGUN = "engine begins"
    LAUNCHED = "chunk launched"
    FENCED = "chunk's fence seen"
    FIRST = "first tokens"
    FINISHED = "engine lets go"
    CANCEL = "cancel"
    OPEN = "OPEN"
    WANT = "WANT"
    SLOT = "part's turn"
    PACKED = "packed"
    TAKEN = "TAKEN"
    DONE_OK = "DONE(ok)"
    DONE_ABANDON = "DONE(abandon)"
    LINK_LOST = "link lost"
    TIMEOUT = "deadline"


class DState(StrEnum):
    """A pull of D."""

    WAITING = "waiting"
    """OPEN is sent; nothing is reserved."""
    PULLING = "pulling"
    COMMITTING = "committing"
    """All is unpacked, DONE(ok) is sent."""
    FAILING = "failing"
    """The hand-off has ended, but an unpack or a copy still writes its blocks."""
    CLOSED = "closed"


class DEvent(StrEnum):
    """Events of a pull."""

    OPEN = "open"
    READY = "READY"
    FINAL = "FINAL"
    LOAD = "begin load"
    PART = "PART"
    SLOT = "part's turn"
    READ_DONE = "read done"
    READ_FAILED = "read failed"
    UNPACKED = "unpacked"
    COMMITTED = "COMMITTED"
    GONE = "GONE"
    CANCEL = "cancel"
    LINK_LOST = "link lost"
    TIMEOUT = "deadline"


class Rule(NamedTuple):
    """One cell: states that may follow (None is forgotten) and what is done, in words."""

    next: tuple[StrEnum | None, ...]
    does: str


_P, _E = PState, PEvent
_TURN = "pack it into the slot granted"
_WANTED = "parts are due; a bad range, or a link that copies blocks, ends it"
_END = "GONE → D; slots not sent and, if the engine has let go, blocks are free"

PRODUCER: Mapping[tuple[PState | None, PEvent], Rule] = {
    (None, _E.ADMIT): Rule((_P.COMPUTING, _P.GONE), "link down: ends at once"),
    (None, _E.REFUSE): Rule((_P.GONE,), "tombstone"),
    (None, _E.OPEN): Rule(
        (_P.EXPECTED, None),
        "await the request, or, of cached blocks, ask the engine; too many: GONE(unknown)",
    ),
    (None, _E.WANT): Rule((None,), "GONE(unknown)"),
    (None, _E.DONE_OK): Rule((None,), "GONE(unknown)"),
    (None, _E.DONE_ABANDON): Rule((None,), "GONE(unknown)"),
    (None, _E.CANCEL): Rule((_P.GONE,), "tombstone"),
    (_P.EXPECTED, _E.ADMIT): Rule(
        (_P.COMPUTING, _P.GONE), "another consumer's OPEN is answered GONE"
    ),
    (_P.EXPECTED, _E.REFUSE): Rule((_P.GONE,), "GONE(refused)"),
    (_P.EXPECTED, _E.OPEN): Rule((_P.EXPECTED,), "–"),
    (_P.EXPECTED, _E.CANCEL): Rule((_P.GONE,), "GONE(cancelled)"),
    (_P.EXPECTED, _E.DONE_ABANDON): Rule((_P.GONE,), "GONE(abandoned)"),
    (_P.EXPECTED, _E.LINK_LOST): Rule((None,), "–"),
    (_P.EXPECTED, _E.TIMEOUT): Rule((_P.GONE,), "GONE(unknown)"),
    (_P.COMPUTING, _E.BEGUN): Rule(
        (_P.COMPUTING,), "READY of 0 tokens to a consumer that opened: it reserves meanwhile"
    ),
    (_P.COMPUTING, _E.LAUNCHED): Rule((_P.COMPUTING,), "remember the blocks; say nothing"),
    (_P.COMPUTING, _E.FENCED): Rule(
        (_P.COMPUTING, _P.LEASED),
        "where blocks are read: their tags; READY (and the blocks) to a consumer that opened; "
        "all and token 1 known: FINAL",
    ),
    (_P.COMPUTING, _E.FIRST): Rule((_P.COMPUTING, _P.LEASED), "all fenced: FINAL"),
    (_P.COMPUTING, _E.FINISHED): Rule(
        (_P.COMPUTING, _P.GONE), "cancelled, or no token 1 was drawn: " + _END
    ),
    (_P.COMPUTING, _E.OPEN): Rule((_P.COMPUTING,), "say all again: READY, FINAL"),
    (_P.COMPUTING, _E.WANT): Rule((_P.COMPUTING, _P.GONE), _WANTED),
    (_P.COMPUTING, _E.SLOT): Rule((_P.COMPUTING,), _TURN),
    (_P.COMPUTING, _E.PACKED): Rule((_P.COMPUTING, _P.GONE), "PART; a failed pack ends it"),
    (_P.COMPUTING, _E.TAKEN): Rule((_P.COMPUTING,), "slot is free"),
    (_P.COMPUTING, _E.DONE_OK): Rule((_P.GONE,), "too early: " + _END),
    (_P.COMPUTING, _E.DONE_ABANDON): Rule((_P.GONE,), _END + "; sent slots too"),
    (_P.COMPUTING, _E.CANCEL): Rule((_P.GONE,), _END),
    (_P.COMPUTING, _E.LINK_LOST): Rule((_P.GONE,), "all slots free; no message"),
    (_P.COMPUTING, _E.TIMEOUT): Rule((_P.GONE,), _END),
    (_P.LEASED, _E.FINISHED): Rule((_P.LEASED, _P.GONE), "cancelled: " + _END),
    (_P.LEASED, _E.OPEN): Rule((_P.LEASED,), "say all again: READY, FINAL"),
    (_P.LEASED, _E.WANT): Rule((_P.LEASED, _P.GONE), _WANTED),
    (_P.LEASED, _E.SLOT): Rule((_P.LEASED,), _TURN),
    (_P.LEASED, _E.PACKED): Rule((_P.LEASED, _P.GONE), "PART; a failed pack ends it"),
    (_P.LEASED, _E.TAKEN): Rule((_P.LEASED,), "slot is free"),
    (_P.LEASED, _E.DONE_OK): Rule(
        (_P.CLOSED, _P.GONE),
        "COMMITTED → D; slots and blocks are free; an item was not sent wholly: ends it",
    ),
    (_P.LEASED, _E.DONE_ABANDON): Rule((_P.GONE,), _END + "; sent slots too"),
    (_P.LEASED, _E.CANCEL): Rule((_P.GONE,), _END),
    (_P.LEASED, _E.LINK_LOST): Rule((_P.GONE,), "all slots free; no message"),
    (_P.LEASED, _E.TIMEOUT): Rule((_P.GONE,), "hard cap: " + _END),
    (_P.GONE, _E.ADMIT): Rule((_P.GONE,), "never leased again; the engine is told"),
    (_P.GONE, _E.BEGUN): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.LAUNCHED): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FENCED): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FIRST): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FINISHED): Rule((_P.GONE,), "blocks are free, once"),
    (_P.GONE, _E.CANCEL): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.OPEN): Rule((_P.GONE,), "GONE(reason)"),
    (_P.GONE, _E.WANT): Rule((_P.GONE,), "GONE(reason)"),
    (_P.GONE, _E.PACKED): Rule((_P.GONE,), "slot is free, no PART"),
    (_P.GONE, _E.TAKEN): Rule((_P.GONE,), "slot is free"),
    (_P.GONE, _E.DONE_OK): Rule((_P.GONE,), "GONE(reason); sent slots are free"),
    (_P.GONE, _E.DONE_ABANDON): Rule((_P.GONE,), "GONE(reason); sent slots are free"),
    (_P.GONE, _E.LINK_LOST): Rule((_P.GONE,), "sent slots are free"),
    (_P.GONE, _E.TIMEOUT): Rule(
        (_P.GONE, None), "forget it, unless the engine or a sent slot still hangs on it"
    ),
    (_P.CLOSED, _E.ADMIT): Rule((_P.CLOSED,), "never leased again; the engine is told"),
    (_P.CLOSED, _E.LAUNCHED): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FENCED): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FIRST): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FINISHED): Rule((_P.CLOSED,), "blocks are free, once"),
    (_P.CLOSED, _E.CANCEL): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.OPEN): Rule((_P.CLOSED,), "GONE(closed)"),
    (_P.CLOSED, _E.DONE_OK): Rule((_P.CLOSED,), "COMMITTED again"),
    (_P.CLOSED, _E.DONE_ABANDON): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.LINK_LOST): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.TIMEOUT): Rule((_P.CLOSED, None), "forget it, unless the engine holds on"),
}

_D, _V = DState, DEvent
_FAIL = "DONE(abandon) → P; slots being read are quarantined; fail"

CONSUMER: Mapping[tuple[DState | None, DEvent], Rule] = {
    (None, _V.OPEN): Rule((_D.WAITING, _D.CLOSED), "OPEN → P; no link: fail"),
    (None, _V.READY): Rule((None,), "DONE(abandon) → P"),
    (None, _V.FINAL): Rule((None,), "DONE(abandon) → P"),
    (None, _V.PART): Rule((None,), "DONE(abandon) → P"),
    (_D.WAITING, _V.READY): Rule((_D.WAITING, _D.CLOSED), "first: tell the engine to reserve"),
    (_D.WAITING, _V.FINAL): Rule(
        (_D.WAITING, _D.CLOSED), "token 1 ended it: DONE(abandon) → P, tell the engine"
    ),
    (_D.WAITING, _V.LOAD): Rule(
        (_D.PULLING, _D.CLOSED),
        "WANT → P, or copy what READY named; nothing to bring and FINAL known: DONE(abandon), "
        "loaded",
    ),
    (_D.WAITING, _V.GONE): Rule((_D.CLOSED,), _FAIL),
    (_D.WAITING, _V.CANCEL): Rule((_D.CLOSED,), "DONE(abandon) → P"),
    (_D.WAITING, _V.LINK_LOST): Rule((_D.CLOSED,), "fail"),
    (_D.WAITING, _V.TIMEOUT): Rule((_D.CLOSED,), _FAIL),
    (_D.PULLING, _V.READY): Rule(
        (_D.PULLING, _D.FAILING, _D.CLOSED),
        "copy what it names; another length, manifest or number of blocks: fail",
    ),
    (_D.PULLING, _V.FINAL): Rule(
        (_D.PULLING, _D.COMMITTING, _D.FAILING, _D.CLOSED),
        "each item complete: DONE(ok) (and, of copies, loaded); nothing was wanted: DONE(abandon), "
        "loaded; "
        "token 1 ended it: DONE(abandon)",
    ),
    (_D.PULLING, _V.PART): Rule(
        (_D.PULLING, _D.FAILING, _D.CLOSED), "read it in its turn; wrong item, range or kind: fail"
    ),
    (_D.PULLING, _V.SLOT): Rule(
        (_D.PULLING,), "read the oldest part into the slot granted, or copy it into blocks"
    ),
    (_D.PULLING, _V.READ_DONE): Rule(
        (_D.PULLING,), "TAKEN → P; verify and unpack; of a copy: compare tags and turns"
    ),
    (_D.PULLING, _V.READ_FAILED): Rule((_D.FAILING, _D.CLOSED), _FAIL),
    (_D.PULLING, _V.UNPACKED): Rule(
        (_D.PULLING, _D.COMMITTING, _D.FAILING, _D.CLOSED),
        "slot is free; each item complete and FINAL: DONE(ok) (and, of copies, loaded); a tag that "
        "was cleared: fail; "
        "wrong header or digest, or the tag of another: DONE(abandon), fail with P's answer",
    ),
    (_D.PULLING, _V.GONE): Rule((_D.FAILING, _D.CLOSED), _FAIL),
    (_D.PULLING, _V.CANCEL): Rule((_D.FAILING, _D.CLOSED), "DONE(abandon) → P"),
    (_D.PULLING, _V.LINK_LOST): Rule((_D.FAILING, _D.CLOSED), "fail"),
    (_D.PULLING, _V.TIMEOUT): Rule((_D.FAILING, _D.CLOSED), _FAIL),
    (_D.COMMITTING, _V.COMMITTED): Rule((_D.CLOSED,), "loaded"),
    (_D.COMMITTING, _V.READY): Rule((_D.COMMITTING,), "–"),
    (_D.COMMITTING, _V.FINAL): Rule((_D.COMMITTING,), "–"),
    (_D.COMMITTING, _V.GONE): Rule((_D.CLOSED,), _FAIL),
    (_D.COMMITTING, _V.CANCEL): Rule((_D.CLOSED,), "DONE(abandon) → P"),
    (_D.COMMITTING, _V.LINK_LOST): Rule((_D.CLOSED,), "fail"),
    (_D.COMMITTING, _V.TIMEOUT): Rule((_D.CLOSED,), _FAIL),
    (_D.FAILING, _V.READ_DONE): Rule(
        (_D.FAILING, _D.CLOSED), "of a copy; last one: blocks are free"
    ),
    (_D.FAILING, _V.READ_FAILED): Rule(
        (_D.FAILING, _D.CLOSED), "of a copy; last one: blocks are free"
    ),
    (_D.FAILING, _V.UNPACKED): Rule((_D.FAILING, _D.CLOSED), "last one: blocks are free"),
    (_D.FAILING, _V.CANCEL): Rule(
        (_D.FAILING, _D.CLOSED), "its ending is already told; P's answer is awaited: tell it now"
    ),
    (_D.FAILING, _V.LOAD): Rule((_D.FAILING,), "its ending is already told"),
    (_D.FAILING, _V.LINK_LOST): Rule((_D.FAILING, _D.CLOSED), "P's answer is awaited: fail"),
    (_D.FAILING, _V.GONE): Rule(
        (_D.FAILING, _D.CLOSED),
        "P's answer is awaited: the lease stood (abandoned) and the link is at fault, or it had "
        "ended; fail",
    ),
    (_D.FAILING, _V.TIMEOUT): Rule(
        (_D.FAILING, _D.CLOSED),
        "P's answer is awaited: fail; else wait on: the unpack or copy is our own",
    ),
    (_D.CLOSED, _V.COMMITTED): Rule((_D.CLOSED,), "of copies: known from their tags"),
    (_D.CLOSED, _V.LOAD): Rule((_D.CLOSED,), "its ending is already told"),
    (_D.CLOSED, _V.LINK_LOST): Rule((_D.CLOSED,), "–"),
    (_D.CLOSED, _V.GONE): Rule((_D.CLOSED,), "the answer to DONE(abandon)"),
    (_D.CLOSED, _V.CANCEL): Rule((_D.CLOSED,), "its ending is already told"),
    (_D.CLOSED, _V.TIMEOUT): Rule((None,), "forget it"),
}
