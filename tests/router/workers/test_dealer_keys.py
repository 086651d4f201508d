"""A router that does not know which key a worker has tries them all, while keys are rotated."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from tests.curve_keys import write_keys

from tandem.link.curve import CurveGuard
from tandem.protocol.keys import KeyRing
from tandem.router.workers.dealer import Dealer

SECONDS = 60.0
"""Four keys take a second; one that is skipped takes for ever."""


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


async def reached(context: zmq.Context[zmq.Socket[bytes]], port: int, ring: KeyRing) -> None:
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


async def test_a_worker_that_refuses_every_key_is_told_of(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    """A router whose own key the worker does not know says so, and no more once it is let in."""
    worker_rings = write_keys(tmp_path, decode=1, router=1)
    strangers = tmp_path / "strange"
    strangers.mkdir()
    ours = write_keys(strangers, router=1)["router"]
    (strangers / "peers" / "decode.1.public").write_bytes(worker_rings["decode"].public)
    guard = CurveGuard(worker_rings["decode"])
    guard.start()
    worker = guard.context.socket(zmq.ROUTER)
    try:
        guard.serve(worker, "router")
        port = worker.bind_to_random_port("tcp://127.0.0.1")
        dealer = Dealer(
            context,
            f"127.0.0.1:{port}",
            received=lambda _: None,
            connected=lambda: None,
            disconnected=lambda: None,
            curve=ours,
        )
        assert not dealer.is_refused
        async with asyncio.timeout(SECONDS):
            while not dealer.is_refused:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            peers = tmp_path / "peers"
            (peers / "router.2.public").write_bytes(ours.public)
            os.utime(peers, (1, 1))
            while dealer.is_refused:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        dealer.close()
    finally:
        worker.close(0)
        guard.stop()
