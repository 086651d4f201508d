"""Headers of a call are bounded by their number, however few bytes name them."""

from __future__ import annotations

from typing import Any

import pytest
from h2.events import ConnectionTerminated
from hpack import Encoder
from tests.router.rpc.test_rpc_connection import HEAD, Owner
from tests.router.rpc.test_rpc_floods import Greeted, framed

from tandem.router.rpc.calm import TURN, Calm
from tandem.router.rpc.frames import HEADERS, Frame
from tandem.router.rpc.heads import BoundedDecoder

MOST = Owner.max_headers - len(HEAD)
"""Headers that a call may have beside those that every call has."""


def block(encoder: Encoder, more: int) -> bytes:
    """A call's headers, and one small one named again and again: a byte each."""
    return encoder.encode([*HEAD, *[("a", "b")] * more])


def call(encoder: Encoder, more: int, stream: int, *, flags: int = 4) -> bytes:
    """A call with these headers."""
    return framed(HEADERS, block(encoder, more), flags=flags, stream=stream)


@pytest.mark.parametrize("more", [MOST + 1, 50, 1_880])
async def test_a_call_of_too_many_headers_ends_its_connection(more: int) -> None:
    """Before they are built: what was decoded is as many as may be, and no call begins."""
    client = Greeted()
    encoder = Encoder()
    await client.heard(call(encoder, MOST, 1))
    assert len(client.begun) == 1
    decoder, decoded = client.server.h2.decoder, 0
    assert isinstance(decoder, BoundedDecoder)
    decode = decoder._decode_indexed

    def counted(data: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return decode(data)

    decoder._decode_indexed = counted  # type: ignore[method-assign]
    events = await client.heard(call(encoder, more, 3))
    assert [each for each in events if isinstance(each, ConnectionTerminated)]
    assert len(client.begun) == 1
    assert decoded <= Owner.max_headers + 1


async def test_headers_that_come_in_parts_are_counted_together() -> None:
    """CONTINUATION begins no new count."""
    client = Greeted()
    whole = block(Encoder(), 50)
    parts = [whole[at : at + 20] for at in range(0, len(whole), 20)]
    frames = framed(HEADERS, parts[0], stream=1)
    frames += b"".join(framed(9, part, stream=1) for part in parts[1:-1])
    events = await client.heard(frames + framed(9, parts[-1], flags=4, stream=1))
    assert [each for each in events if isinstance(each, ConnectionTerminated)]
    assert not client.begun


def test_calls_with_many_headers_are_few_in_a_turn() -> None:
    """A block weighs by its bytes, since each may be a header."""

    def in_a_turn(more: int) -> int:
        encoder, calm = Encoder(), Calm(0.0)
        call(encoder, more, 1)  # from here on a header is a byte
        frame = Frame(HEADERS, 4, 3, call(encoder, more, 3), True)
        return -(-TURN // calm.heard(frame))

    assert in_a_turn(0) > 2
    assert in_a_turn(128) <= 2
    assert in_a_turn(1_880) <= 2
