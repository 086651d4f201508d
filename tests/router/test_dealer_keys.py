"""A router that does not know which key a worker has tries them all, while keys are rotated."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tests.curve_keys import write_keys

from tandem.engine.core.guard import CurveGuard
from tandem.protocol.keys import KeyRing
from tandem.router.workers.dealer import Dealer

SECONDS = 10.0
"""Four keys take a second; one that is skipped takes for ever."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    """The router's, apart from the worker's."""
    with zmq.Context() as made:
        yield made


async def reached(context: zmq.Context[zmq.Socket[bytes]], port: int, ring: KeyRing) -> None:
    """Until a dealer's handshake has succeeded."""
    connected = asyncio.Event()
    dealer = Dealer(
        context,
        f"127.0.0.1:{port}",
        received=lambda _: None,
        connected=connected.set,
        disconnected=lambda: None,
        curve=ring,
    )
    try:
        async with asyncio.timeout(SECONDS):
            await connected.wait()
    finally:
        dealer.close()


@pytest.mark.parametrize("name", ["decode.2", "decode.1", "prefill.2", "prefill.1"])
async def test_every_known_key_gets_its_turn(
    name: str, context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """A worker of either role and of any generation is reached, whichever key is tried first."""
    rings = {1: write_keys(tmp_path, decode=1, prefill=1, router=1)}
    rings[2] = write_keys(tmp_path, decode=2, prefill=2, router=2)
    role, _, generation = name.partition(".")
    guard = CurveGuard(rings[int(generation)][role])
    guard.start()
    worker = guard.context.socket(zmq.ROUTER)
    try:
        guard.serve(worker, "router")
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        await reached(context, port, rings[2]["router"])
    finally:
        worker.close(0)
        guard.stop()
