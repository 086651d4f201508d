"""State × event of both machines: the expected events and the possible next states.

``step`` only counts other pairs. docs/handoff.md is made from this module, and the model checker
compares every step with ``next``.
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
    """All KV is computed and leased; token 1 is known."""
    GONE = "gone"
    """No lease; kept to answer messages."""
    CLOSED = "closed"
    """Committed; kept to answer messages."""


class PEvent(StrEnum):
    """Events of an export."""

    ADMIT = "admit"
    REFUSE = "refuse"
    BEGUN = "engine begins"
    LAUNCHED = "chunk launched"
    FENCED = "chunk's fence reached"
    FIRST = "first tokens"
    FINISHED = "engine finished"
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
    """States that may follow (None is forgotten) and the action, in words."""

    next: tuple[StrEnum | None, ...]
    does: str


_P, _E = PState, PEvent
_TURN = "pack it into the granted slot"
_WANTED = "queue parts; a bad range or a link that copies blocks: end"
_END = "GONE → D; free unsent slots and, if the engine has finished, blocks"

PRODUCER: Mapping[tuple[PState | None, PEvent], Rule] = {
    (None, _E.ADMIT): Rule((_P.COMPUTING, _P.GONE), "link down: end"),
    (None, _E.REFUSE): Rule((_P.GONE,), "remember the key"),
    (None, _E.OPEN): Rule(
        (_P.EXPECTED, None),
        "wait for the request, or query the engine for cached blocks; too many: GONE(unknown)",
    ),
    (None, _E.WANT): Rule((None,), "GONE(unknown)"),
    (None, _E.DONE_OK): Rule((None,), "GONE(unknown)"),
    (None, _E.DONE_ABANDON): Rule((None,), "GONE(unknown)"),
    (None, _E.CANCEL): Rule((_P.GONE,), "remember the key"),
    (_P.EXPECTED, _E.ADMIT): Rule((_P.COMPUTING, _P.GONE), "GONE to an OPEN of another consumer"),
    (_P.EXPECTED, _E.REFUSE): Rule((_P.GONE,), "GONE(refused)"),
    (_P.EXPECTED, _E.OPEN): Rule((_P.EXPECTED,), "–"),
    (_P.EXPECTED, _E.CANCEL): Rule((_P.GONE,), "GONE(cancelled)"),
    (_P.EXPECTED, _E.DONE_ABANDON): Rule((_P.GONE,), "GONE(abandoned)"),
    (_P.EXPECTED, _E.LINK_LOST): Rule((None,), "–"),
    (_P.EXPECTED, _E.TIMEOUT): Rule((_P.GONE,), "GONE(unknown)"),
    (_P.COMPUTING, _E.BEGUN): Rule(
        (_P.COMPUTING,),
        "READY of 0 tokens to a consumer that sent OPEN, so that it reserves blocks",
    ),
    (_P.COMPUTING, _E.LAUNCHED): Rule((_P.COMPUTING,), "remember the blocks"),
    (_P.COMPUTING, _E.FENCED): Rule(
        (_P.COMPUTING, _P.LEASED),
        "set tags if blocks are copied; READY to a consumer that sent OPEN; "
        "FINAL if all KV and token 1 are known",
    ),
    (_P.COMPUTING, _E.FIRST): Rule((_P.COMPUTING, _P.LEASED), "FINAL if all fences are reached"),
    (_P.COMPUTING, _E.FINISHED): Rule((_P.COMPUTING, _P.GONE), "cancelled, or no token 1: " + _END),
    (_P.COMPUTING, _E.OPEN): Rule((_P.COMPUTING,), "send READY and FINAL again"),
    (_P.COMPUTING, _E.WANT): Rule((_P.COMPUTING, _P.GONE), _WANTED),
    (_P.COMPUTING, _E.SLOT): Rule((_P.COMPUTING,), _TURN),
    (_P.COMPUTING, _E.PACKED): Rule((_P.COMPUTING, _P.GONE), "PART → D; a failed pack: end"),
    (_P.COMPUTING, _E.TAKEN): Rule((_P.COMPUTING,), "free the slot"),
    (_P.COMPUTING, _E.DONE_OK): Rule((_P.GONE,), "too early: " + _END),
    (_P.COMPUTING, _E.DONE_ABANDON): Rule((_P.GONE,), _END + "; free sent slots"),
    (_P.COMPUTING, _E.CANCEL): Rule((_P.GONE,), _END),
    (_P.COMPUTING, _E.LINK_LOST): Rule((_P.GONE,), "free all slots; no message"),
    (_P.COMPUTING, _E.TIMEOUT): Rule((_P.GONE,), _END),
    (_P.LEASED, _E.FINISHED): Rule((_P.LEASED, _P.GONE), "cancelled: " + _END),
    (_P.LEASED, _E.OPEN): Rule((_P.LEASED,), "send READY and FINAL again"),
    (_P.LEASED, _E.WANT): Rule((_P.LEASED, _P.GONE), _WANTED),
    (_P.LEASED, _E.SLOT): Rule((_P.LEASED,), _TURN),
    (_P.LEASED, _E.PACKED): Rule((_P.LEASED, _P.GONE), "PART → D; a failed pack: end"),
    (_P.LEASED, _E.TAKEN): Rule((_P.LEASED,), "free the slot"),
    (_P.LEASED, _E.DONE_OK): Rule(
        (_P.CLOSED, _P.GONE),
        "COMMITTED → D; free slots and blocks; an incomplete item: end",
    ),
    (_P.LEASED, _E.DONE_ABANDON): Rule((_P.GONE,), _END + "; free sent slots"),
    (_P.LEASED, _E.CANCEL): Rule((_P.GONE,), _END),
    (_P.LEASED, _E.LINK_LOST): Rule((_P.GONE,), "free all slots; no message"),
    (_P.LEASED, _E.TIMEOUT): Rule((_P.GONE,), "hard cap: " + _END),
    (_P.GONE, _E.ADMIT): Rule((_P.GONE,), "no second lease; notify the engine"),
    (_P.GONE, _E.BEGUN): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.LAUNCHED): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FENCED): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FIRST): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.FINISHED): Rule((_P.GONE,), "free the blocks once"),
    (_P.GONE, _E.CANCEL): Rule((_P.GONE,), "–"),
    (_P.GONE, _E.OPEN): Rule((_P.GONE,), "GONE(reason)"),
    (_P.GONE, _E.WANT): Rule((_P.GONE,), "GONE(reason)"),
    (_P.GONE, _E.PACKED): Rule((_P.GONE,), "free the slot; no PART"),
    (_P.GONE, _E.TAKEN): Rule((_P.GONE,), "free the slot"),
    (_P.GONE, _E.DONE_OK): Rule((_P.GONE,), "GONE(reason); free sent slots"),
    (_P.GONE, _E.DONE_ABANDON): Rule((_P.GONE,), "GONE(reason); free sent slots"),
    (_P.GONE, _E.LINK_LOST): Rule((_P.GONE,), "free sent slots"),
    (_P.GONE, _E.TIMEOUT): Rule(
        (_P.GONE, None), "forget it, unless the engine or a sent slot still uses it"
    ),
    (_P.CLOSED, _E.ADMIT): Rule((_P.CLOSED,), "no second lease; notify the engine"),
    (_P.CLOSED, _E.LAUNCHED): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FENCED): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FIRST): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.FINISHED): Rule((_P.CLOSED,), "free the blocks once"),
    (_P.CLOSED, _E.CANCEL): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.OPEN): Rule((_P.CLOSED,), "GONE(closed)"),
    (_P.CLOSED, _E.DONE_OK): Rule((_P.CLOSED,), "send COMMITTED again"),
    (_P.CLOSED, _E.DONE_ABANDON): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.LINK_LOST): Rule((_P.CLOSED,), "–"),
    (_P.CLOSED, _E.TIMEOUT): Rule((_P.CLOSED, None), "forget it, unless the engine still uses it"),
}

_D, _V = DState, DEvent
_FAIL = "DONE(abandon) → P; quarantine slots being read; fail"

CONSUMER: Mapping[tuple[DState | None, DEvent], Rule] = {
    (None, _V.OPEN): Rule((_D.WAITING, _D.CLOSED), "OPEN → P; no link: fail"),
    (None, _V.READY): Rule((None,), "DONE(abandon) → P"),
    (None, _V.FINAL): Rule((None,), "DONE(abandon) → P"),
    (None, _V.PART): Rule((None,), "DONE(abandon) → P"),
    (_D.WAITING, _V.READY): Rule(
        (_D.WAITING, _D.CLOSED), "first one: notify the engine to reserve blocks"
    ),
    (_D.WAITING, _V.FINAL): Rule(
        (_D.WAITING, _D.CLOSED), "token 1 ended the request: DONE(abandon) → P, notify the engine"
    ),
    (_D.WAITING, _V.LOAD): Rule(
        (_D.PULLING, _D.CLOSED),
        "WANT → P, or copy the blocks of READY; nothing to fetch and FINAL known: "
        "DONE(abandon), loaded",
    ),
    (_D.WAITING, _V.GONE): Rule((_D.CLOSED,), _FAIL),
    (_D.WAITING, _V.CANCEL): Rule((_D.CLOSED,), "DONE(abandon) → P"),
    (_D.WAITING, _V.LINK_LOST): Rule((_D.CLOSED,), "fail"),
    (_D.WAITING, _V.TIMEOUT): Rule((_D.CLOSED,), _FAIL),
    (_D.PULLING, _V.READY): Rule(
        (_D.PULLING, _D.FAILING, _D.CLOSED),
        "copy its blocks; another length, manifest or number of blocks: fail",
    ),
    (_D.PULLING, _V.FINAL): Rule(
        (_D.PULLING, _D.COMMITTING, _D.FAILING, _D.CLOSED),
        "each item complete: DONE(ok), for copies also loaded; nothing to fetch: DONE(abandon), "
        "loaded; token 1 ended the request: DONE(abandon)",
    ),
    (_D.PULLING, _V.PART): Rule(
        (_D.PULLING, _D.FAILING, _D.CLOSED), "queue the read; wrong item, range or kind: fail"
    ),
    (_D.PULLING, _V.SLOT): Rule(
        (_D.PULLING,), "read the oldest part into the granted slot, or copy it into blocks"
    ),
    (_D.PULLING, _V.READ_DONE): Rule(
        (_D.PULLING,), "TAKEN → P; verify and unpack; for copies compare tags and turns"
    ),
    (_D.PULLING, _V.READ_FAILED): Rule((_D.FAILING, _D.CLOSED), _FAIL),
    (_D.PULLING, _V.UNPACKED): Rule(
        (_D.PULLING, _D.COMMITTING, _D.FAILING, _D.CLOSED),
        "free the slot; each item complete and FINAL: DONE(ok), for copies also loaded; a cleared "
        "tag: fail; wrong header, digest or tag: DONE(abandon), fail after P's answer",
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
        (_D.FAILING, _D.CLOSED), "copies only; the last one frees the blocks"
    ),
    (_D.FAILING, _V.READ_FAILED): Rule(
        (_D.FAILING, _D.CLOSED), "copies only; the last one frees the blocks"
    ),
    (_D.FAILING, _V.UNPACKED): Rule((_D.FAILING, _D.CLOSED), "the last one frees the blocks"),
    (_D.FAILING, _V.CANCEL): Rule(
        (_D.FAILING, _D.CLOSED), "already reported; if waiting for P's answer: report now"
    ),
    (_D.FAILING, _V.LOAD): Rule((_D.FAILING,), "already reported"),
    (_D.FAILING, _V.LINK_LOST): Rule((_D.FAILING, _D.CLOSED), "if waiting for P's answer: fail"),
    (_D.FAILING, _V.GONE): Rule(
        (_D.FAILING, _D.CLOSED),
        "if waiting for P's answer: fail; the link is at fault if the lease was valid (abandoned)",
    ),
    (_D.FAILING, _V.TIMEOUT): Rule(
        (_D.FAILING, _D.CLOSED),
        "if waiting for P's answer: fail; else wait for D's own unpack or copy",
    ),
    (_D.CLOSED, _V.COMMITTED): Rule((_D.CLOSED,), "copies only: already known from the tags"),
    (_D.CLOSED, _V.LOAD): Rule((_D.CLOSED,), "already reported"),
    (_D.CLOSED, _V.LINK_LOST): Rule((_D.CLOSED,), "–"),
    (_D.CLOSED, _V.GONE): Rule((_D.CLOSED,), "the answer to DONE(abandon)"),
    (_D.CLOSED, _V.CANCEL): Rule((_D.CLOSED,), "already reported"),
    (_D.CLOSED, _V.TIMEOUT): Rule((None,), "forget it"),
}
