"""The app as it runs: what its clock counts from, and a discovery that fails."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable

import pytest
from tests.router.behaviours import Make
from tests.router.http_server import Served
from tests.waiting import wait_for

from tandem.router.workers.discovery import StaticDiscovery

Serve = Callable[..., Served]


def test_time_to_first_token_counts_from_arrival(serve: Serve, decode: Make) -> None:
    """A body that comes slowly is part of it, as its client sees it."""
    served = serve(decode(step=0.001))
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()
    calls = served.server.server_state.tasks
    wait_for(lambda: not calls)
    with socket.create_connection(("127.0.0.1", served.socket.getsockname()[1]), 10) as client:
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body[:10])
        wait_for(lambda: calls)  # the head has been read
        time.sleep(1.0)
        client.sendall(body[10:])
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    name = 'vllm:time_to_first_token_seconds_sum{model_name="fake"}'
    line = next(each for each in served.metrics().splitlines() if each.startswith(name))

    assert float(line.split()[-1]) >= 0.5


def test_a_discovery_that_fails_begins_anew(
    serve: Serve, decode: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted, and workers are found all the same."""
    tries = []

    class Flaky(StaticDiscovery):
        async def run(self, interval: float = 15.0) -> None:
            tries.append(1)
            if len(tries) == 1:
                raise OSError("no such cluster")
            await super().run(interval)

    monkeypatch.setattr("tandem.router.app.StaticDiscovery", Flaky)
    monkeypatch.setattr("tandem.router.app.FIND_AGAIN", 0.1)
    served = serve(decode())

    assert len(tries) == 2
    assert "no such cluster" in caplog.text
    assert "tandem:router_discovery_failures_total 1.0" in served.metrics()
