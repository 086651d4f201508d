"""What a client says beside its calls: weighed, so that nobody waits for it, and bounded.

Frames that bring nothing (settings, priorities, pings, data of no byte) cost the router what others
do. ``http2`` takes some in each turn of its loop; here is how much that is, and how many of them a
connection may say. Calls have bounds of their own there.
"""

from __future__ import annotations

from tandem.router.rpc.frames import DATA, HEADERS, PING, WINDOW_UPDATE, Frame

TURN = 256
"""What the frames of one turn weigh; about half a millisecond."""
SPARE = 16_384
"""What a connection may say beyond what it earns; that is measured by the same weight."""
_BY_HAND, _BY_H2, _A_CALL = 1, 5, 64
"""Of a frame: about 2 µs each."""
_BYTES = 7
"""Bits of a length that weigh nothing."""
_HEAD_BYTES = 256
"""Bytes of a call's headers that weigh half of one each: every one may be a header."""
_EARNED_BY_CALL = 32
_EARNED_IN_A_SECOND = 512
_SENT_BYTES = 4
"""Of answers: a client may say something for each. A token's message has 13 or more, for which some
give room to the call and to the connection, and ask how far the server is."""
_LARGE_DATA = 256
"""Bytes of a request in one frame, which are worth it."""


class Calm:
    """Of one connection."""

    def __init__(self, now: float) -> None:
        self._left = float(SPARE)
        self._since = now
        self._num_sent = 0

    def heard(self, frame: Frame) -> int:
        """Count a frame; what it weighs."""
        weight = _weight_of(frame)
        if frame.kind == HEADERS:
            self._left += _EARNED_BY_CALL
        elif frame.kind != DATA or len(frame.whole) < _LARGE_DATA:
            self._left -= weight
        return weight

    def is_kept(self, now: float, num_sent: int) -> bool:
        """False where more was said than may be, by a time of the loop; ``num_sent`` are the bytes
        of all answers so far."""
        earned = (now - self._since) * _EARNED_IN_A_SECOND
        earned += (num_sent - self._num_sent) / _SENT_BYTES
        self._since, self._num_sent = now, num_sent
        self._left = min(SPARE, self._left + earned)
        return self._left >= 0


def _weight_of(frame: Frame) -> int:
    kind = frame.kind
    if kind == WINDOW_UPDATE or (kind == PING and not frame.flags):
        return _BY_HAND
    if kind == HEADERS:
        return _A_CALL + (min(len(frame.whole), _HEAD_BYTES) >> 1)
    return _BY_H2 + (len(frame.whole) >> _BYTES)
