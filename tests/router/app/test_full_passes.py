"""The collector's full passes wait for quiet, and find next to nothing."""

from __future__ import annotations

import asyncio
import gc
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.router.behaviours import Make
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.router import server
from tandem.router.server import MOST, WORTH, is_due, paced

BODY = b'{"prompt": "Hi", "max_tokens": 100, "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.fixture
def no_passes() -> Iterator[None]:
    """Nothing is collected but what nobody refers to."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_passes")
@pytest.mark.parametrize("leaves", [False, True], ids=["answered", "client leaves"])
def test_what_a_connection_leaves_needs_no_pass(
    serve: Callable[..., Served], decode: Make, leaves: bool
) -> None:
    """It goes with its last reference: the connection, and the request of it."""
    served = serve(decode(step=0.005))
    with closing(socket.create_connection(("127.0.0.1", served.socket.getsockname()[1]))) as end:
        end.sendall(HEAD % (len(BODY), CLOSE) + BODY)
        assert end.recv(1 << 16)
        connections: list[Any] = list(served.server.server_state.connections)
        assert len(connections) == 1
        left = [weakref.ref(connections[0]), weakref.ref(connections[0].cycle)]
        connections.clear()
        while not leaves and end.recv(1 << 16):
            pass

    wait_for(lambda: all(each() is None for each in left))


def test_a_full_pass_is_made_in_quiet_moments_and_else_when_it_must() -> None:
    assert not is_due(WORTH - 1, quiet=True)
    assert is_due(WORTH, quiet=True)
    assert not is_due(MOST - 1, quiet=False)
    assert is_due(MOST, quiet=False)


async def test_passes_are_paced_while_the_router_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """None comes by itself, whatever there is; and all is as it was behind the block."""
    monkeypatch.setattr(server, "SECONDS", 0.01)
    before, quiet, full = gc.get_threshold(), False, 0

    def noted(phase: str, info: dict[str, int]) -> None:
        nonlocal full
        full += phase == "stop" and info["generation"] == 2

    gc.callbacks.append(noted)
    try:
        async with paced(lambda: quiet):
            kept = [[] for _ in range(200_000)]  # type: ignore[var-annotated]
            await asyncio.sleep(0.05)
            assert not full
            quiet = True
            while not full:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(kept) == 200_000
        assert gc.get_threshold() == before
    finally:
        gc.callbacks.remove(noted)
        gc.unfreeze()
