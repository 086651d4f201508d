"""Generates docs/handoff.md: ``python -m tandem.kvtransfer.handoff.document > docs/handoff.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TypeVar, get_args, get_origin

import msgspec

from tandem.kvtransfer.handoff import messages
from tandem.kvtransfer.handoff.manifest import CARRIED, RULES
from tandem.kvtransfer.handoff.tables import CONSUMER, PRODUCER, DState, PState, Rule
from tandem.protocol.card import KVKind

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)

_INTRODUCTION = """\
# KV hand-off: messages and states

Generated from `tandem.kvtransfer.handoff.tables` and `.messages` by
`python -m tandem.kvtransfer.handoff.document`; do not edit.

P (producer, a prefill worker) computes the KV of a prompt. D (consumer, a decode worker) reads it.
A key is one attempt at one request. Every frame carries the incarnations of both ends and a
sequence number. A frame that does not match ends the link and all its keys on both ends. So does a
frame over 1 MiB: P ends such a key with GONE(internal) instead. Deadlines travel as remaining
milliseconds, because each end has its own clock.

Invariants:

1. D uses KV only after COMMITTED. P's transfer thread sends it only if the lease never lapsed and
   every read of D has ended. For copies (6), matching tags and turns replace it
   (docs/decisions/commit-by-tags.md).
2. P sends READY for a token only after the host has seen the fence of its KV. Until COMMITTED or
   GONE the blocks are neither written nor freed. P sends GONE before the first reuse. After GONE P
   packs no further part, because the engine may have released the memory.
3. P reuses a send slot that D may be reading only after D's answer (TAKEN, DONE) or the loss of the
   link. A receive slot with an unfinished read is quarantined.
4. A key is leased at most once per incarnation. Ended keys are remembered for a while. Messages for
   unknown keys are answered, so that the other end can free its memory.
5. A pair of state and event that is not listed below changes nothing and is counted.
6. On a link that copies P's blocks into D's, no slot is used. READY names blocks, and D runs or
   fences every copy itself. P sets a block's tag after its last write. P raises its turn and clears
   the tag before it releases the block. D compares the tag after the copy, and the turn with the
   one before. D's blocks are free only after the last copy into them has ended.
   A wrong tag, header or digest fails the hand-off. It counts against the link only if P answers
   that the lease was valid until then.
7. The manifest of the layout lists one item per group. D is done when each item is complete by its
   own rule.
8. OPEN with hashes fetches blocks of P's cache, from the first on, between any two workers
   (docs/decisions/prefix-fetch.md). P's engine pins the blocks and announces them when the steps
   that write them have ended: all at once, with a FINAL without a token. P answers GONE(refused) if
   it has none or may not lend them. D computes the prompt if a fetch ends for any reason.

Reported failures of other systems and the tests that cover them:
[handoff-pains.md](handoff-pains.md).
The model checker for these tables: tests/kvtransfer/model/README.md.
"""

_AFTER_ITEMS = """
D does not fetch blocks that it has cached, except states and encoder outputs. It fetches nothing if
only token 1 is missing. A block is sent with its group's own bytes, a copied one whole. States are
sent unchanged if block sizes differ or KV is narrowed. If one end holds KV as codes and the other
does not, codes are sent, and blocks are not copied into blocks. A link to a layout
with a group that cannot be handed over, or that the other end lacks, is refused by name.
"""


def document() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION,
        "## Messages\n",
        "| message | direction | fields | meaning |\n|---|---|---|---|",
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
    for prefix in ("D → P: ", "P → D: ", "Both ways: ", "D → P, ", "P → D, "):
        text = text.removeprefix(prefix)
    name = str(kind.__struct_config__.tag).upper()
    fields = ", ".join(kind.__struct_fields__ if card is None else card.__struct_fields__)
    return f"| {name} | {way} | {fields} | {text} |"


def _table(rules: Mapping[tuple[_State | None, _Event], Rule], states: type[_State]) -> str:
    rows = ["| state | events | next | action |", "|---|---|---|---|"]
    for state in (None, *states):
        events: dict[Rule, list[str]] = {}
        for (here, event), rule in rules.items():
            if here is state:
                events.setdefault(rule, []).append(event)
        rows += (
            f"| {_name(state)} | {', '.join(names)} | {_names(rule.next)} | {rule.does} |"
            for rule, names in events.items()
        )
    return "\n".join(rows)


def _names(states: Iterable[StrEnum | None]) -> str:
    return ", ".join(_name(state) for state in states)


def _name(state: StrEnum | None) -> str:
    return "(unknown)" if state is None else state.name


if __name__ == "__main__":
    sys.stdout.write(document())
