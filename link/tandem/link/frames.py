"""Codec of a link's frames, bounded and strict: a frame is a valid message or it is dropped.

A ZMQ message has two parts (after a ROUTER socket's identity part): the header of
``tandem.protocol.link`` and a message of the link's protocol, in msgpack with one tag per kind.
Anything else raises WireError; the receiver counts and drops it.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tandem.protocol.errors import WireError
from tandem.protocol.messages import ToRouter, ToWorker

Message = TypeVar("Message")

MAX_FRAME_BYTES = 64 << 20
"""Bound of frames between router and worker: a 1 M token prompt is about 5 MB."""


class Decoder(Generic[Message]):
    """Decoder of the messages of one direction."""

    def __init__(self, kinds: Any, max_bytes: int) -> None:
        """Make a decoder of ``kinds``, a union of tagged structs. Longer frames are not decoded."""
        self.max_bytes = max_bytes
        self._decode = msgspec.msgpack.Decoder(kinds).decode

    def __call__(self, payload: bytes) -> Message:
        """Return the message. Raises WireError."""
        if len(payload) > self.max_bytes:
            raise WireError(f"frame of {len(payload)} bytes; at most {self.max_bytes} are read")
        try:
            message: Message = self._decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"not a message: {error}") from error
        return message


decode_to_worker: Decoder[ToWorker] = Decoder(ToWorker, MAX_FRAME_BYTES)
decode_to_router: Decoder[ToRouter] = Decoder(ToRouter, MAX_FRAME_BYTES)
