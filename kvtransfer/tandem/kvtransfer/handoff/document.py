"""Makes docs/handoff.md from the tables that the code runs.

    python -m tandem.kvtransfer.handoff.document > docs/handoff.md

A test holds the file to this module's output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar, get_args, get_origin

import msgspec

from tandem.kvtransfer.handoff import messages
from tandem.kvtransfer.handoff.manifest import CARRIED, RULES
from tandem.kvtransfer.handoff.tables import CONSUMER, PRODUCER, DState, PState, Rule
from tandem.protocol.layout import KVKind

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)

_INTRODUCTION = """\
# The KV hand-off: messages and states

Made from `tandem.kvtransfer.handoff.tables` and `.messages` by
`python -m tandem.kvtransfer.handoff.document`; do not edit.

P (producer, a prefill worker) computes a prompt's KV; D (consumer, a decode worker) takes it. A key
is one attempt at one request. Every frame carries the incarnations of both ends and a sequence
number; a frame that does not fit ends the link, and with it all its keys, on both ends. So does one
longer than the other end reads (1 MiB): P ends the key instead of saying it, with GONE(internal).
Deadlines travel as remaining milliseconds; each end has its own clock.

What holds:

1. D uses KV only after COMMITTED, which P's transfer thread says only if the lease never lapsed,
   after every read of D was terminal; or, of copies (6), after tag and turn of each block were
   right behind the copy, which says the same (docs/decisions/021).
2. P says READY of a token only after the host has seen the fence behind its KV. From then until
   COMMITTED or GONE the blocks are not written or freed; GONE comes before the first reuse. After
   GONE P begins to pack no part of them: the engine may have given their memory back.
3. A send slot that D may be reading is not reused before D has answered (TAKEN, DONE) or the link
   is lost. A receive slot whose read is not terminal is quarantined, never reused.
4. A key is leased at most once per incarnation. What has ended is remembered for a while, to answer
   what comes late; what is unknown is answered, so that the other end can free.
5. A pair of state and event that is not below changes nothing and is counted.
6. Where a link's transport copies P's blocks into D's, no slot is used: READY names blocks, D asks
   for nothing, and only copies that D itself runs or fences may do so. P sets a block's tag after
   its last write, and clears it before the block is anybody's again, raising its turn each time;
   D compares the tag that it read after the copy, and the turn with that before it.
   D's blocks are free only after the last copy into them is terminal, wanted or not.
   The tag of another, like a slot's wrong header or digest, fails the hand-off, and speaks against
   the link only if P answers that its lease stood till then: a lease may end, or P count D as lost,
   and the blocks or the slot be the next request's, while D reads.
7. What a hand-off carries is the manifest of its layout: an item a group. D is done when every item
   is complete by its own rule; no item stands in for another.
8. OPEN with hashes pulls what P has cached, from the first block on: any worker may be this D, and
   any this P (docs/decisions/035). P's engine holds the blocks, and announces them once the steps
   that write them are through: all at once, with a FINAL that has no token. What it has no more of,
   or may not lend, is answered GONE(refused); whatever ends a pull, D computes instead.

What users of other systems suffered here, and the test that holds each:
[handoff-pains.md](handoff-pains.md).
The checker that walks these tables, its states and its mutants: tests/kvtransfer/model/README.md.
"""

_AFTER_ITEMS = """
Blocks that D has cached need not come, except states and what encoders said. A layout with a group
that is not handed over, or that the other end has not, is refused by name when a link is made.
"""


def document() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION,
        "## Messages\n",
        "| message | way | fields | meaning |\n|---|---|---|---|",
        *(_message_row(kind) for kind in _kinds()),
        "\n## Items of a manifest\n",
        "| kind | complete with | handed over |\n|---|---|---|",
        *(f"| {kind} | {rule} | {_carried(kind)} |" for kind, rule in RULES.items()),
        _AFTER_ITEMS,
        "\n## P's states\n",
        _table(PRODUCER, PState),
        "\n## D's states\n",
        _table(CONSUMER, DState),
    ]
    return "\n".join(parts) + "\n"


def _carried(kind: KVKind) -> str:
    return "yes" if kind in CARRIED else "no"


def _kinds() -> list[type[msgspec.Struct]]:
    to_producer = messages.ToProducer.__args__
    to_consumer = messages.ToConsumer.__args__
    return list(dict.fromkeys([*to_producer, *to_consumer]))


def _message_row(kind: type[msgspec.Struct]) -> str:
    to_producer = kind in messages.ToProducer.__args__
    to_consumer = kind in messages.ToConsumer.__args__
    (card,) = get_args(kind) or (None,)
    kind = get_origin(kind) or kind
    way = "both" if to_producer and to_consumer else "D → P" if to_producer else "P → D"
    text = " ".join((kind.__doc__ or "").split())
    for prefix in ("From who calls, ", "D → P: ", "P → D: ", "Both ways: ", "D → P, ", "P → D, "):
        text = text.removeprefix(prefix)
    name = str(kind.__struct_config__.tag).upper()
    fields = ", ".join(kind.__struct_fields__ if card is None else card.__struct_fields__)
    return f"| {name} | {way} | {fields} | {text} |"


def _table(rules: Mapping[tuple[_State | None, _Event], Rule], states: type[_State]) -> str:
    rows = ["| state | event | next | what is done |", "|---|---|---|---|"]
    for state in (None, *states):
        for (here, event), rule in rules.items():
            if here is state:
                shown = _names(rule.next)
                rows.append(f"| {_name(state)} | {event} | {shown} | {rule.does} |")
    return "\n".join(rows)


def _names(states: Iterable[StrEnum | None]) -> str:
    return ", ".join(_name(state) for state in states)


def _name(state: StrEnum | None) -> str:
    return "(unknown)" if state is None else state.name


if __name__ == "__main__":
    sys.stdout.write(document())
