"""A router that is told to listen on `::` answers both families, until it has ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tests import clear_text
from tests.waiting import wait_for

from tandem.base.listening import has_ipv6
from tandem.router.api.stopping import Ending
from tandem.router.config import RouterConfig
from tandem.router.server import Server, make_server

IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


class App:
    state = SimpleNamespace(ending=Ending(), rpc=None)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for what in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{what}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
def server() -> Iterator[Server]:
    config = RouterConfig(model="m", host="::", port=0, workers=("127.0.0.1:1",), drain_timeout=1.0)
    made = make_server(App(), config)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    wait_for(lambda: made.started)
    yield made
    made.should_exit = True
    thread.join(15)
    assert not thread.is_alive()


@pytest.mark.parametrize("host", [pytest.param("127.0.0.1"), pytest.param("[::1]", marks=IPV6)])
def test_both_families_reach_it(server: Server, host: str) -> None:
    port = server.servers[0].sockets[0].getsockname()[1]
    url = f"http://{host}:{port}/health"
    assert clear_text.get(url).status_code == 200
    server.should_exit = True

    def is_gone() -> bool:
        try:
            clear_text.get(url)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            pass  # connected in the moment of the end
        return False

    wait_for(is_gone)
