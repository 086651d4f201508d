"""The known pattern that a new link must deliver before a request may use it.

It has a slot of its own after P's send slots, written once. It differs by process, so that the
pattern of a predecessor at the same address is not accepted. Half-open links read it too, so that
no user's request is ever the probe.
"""

from __future__ import annotations

from hashlib import shake_128

from tandem.protocol.ids import Incarnation

_PIECE = 4096


def pattern(incarnation: Incarnation, nbytes: int) -> bytes:
    """Return ``nbytes`` of P's pattern; pieces differ, so that swapped pages are seen."""
    pieces = []
    for n in range(-(-nbytes // _PIECE)):
        seed = incarnation + n.to_bytes(8, "little")
        pieces.append(shake_128(seed).digest(64) * (_PIECE // 64))
    return b"".join(pieces)[:nbytes]
