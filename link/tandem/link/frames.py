"""What comes on a link is bounded and strict: it is a message, or it is garbage.

A ZMQ message has two parts (behind a ROUTER socket the caller's identity goes before them): the
header of ``tandem.protocol.link`` and a message of the link's protocol, in msgpack with a tag a
kind. What does not fit raises WireError, is counted by the receiver and dropped.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tandem.protocol.errors import WireError
from tandem.protocol.messages import ToRouter, ToWorker

Message = TypeVar("Message")

MAX_FRAME_BYTES = 64 << 20
"""Of router and worker: a 1 M token prompt is about 5 MB."""


class Decoder(Generic[Message]):
    """Of the messages of one direction."""

    def __init__(self, kinds: Any, max_bytes: int) -> None:
        """``kinds``: union of tagged structs. Longer frames are dropped unread."""
        self.max_bytes = max_bytes
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def __call__(self, payload: bytes) -> Message:
        """The message, or WireError."""
        if len(payload) > self.max_bytes:
            raise WireError(f"frame of {len(payload)} bytes; at most {self.max_bytes} are read")
        try:
            message: Message = self._decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error
        return message


decode_to_worker: Decoder[ToWorker] = Decoder(ToWorker, MAX_FRAME_BYTES)
decode_to_router: Decoder[ToRouter] = Decoder(ToRouter, MAX_FRAME_BYTES)
