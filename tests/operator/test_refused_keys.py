"""What routers say of keys that do not fit, and what counts while they say nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest
from tests.operator.test_decisions import pod

from tandem.operator.desired.naming import Role
from tandem.operator.probes.refusals import Refusals

KEY = ("ns", "demo")


class _Router(BaseHTTPRequestHandler):
    refused: tuple[str, ...] | None = None
    """By which workers; None for one that is too busy to say."""

    def do_GET(self) -> None:
        self.send_response(200 if self.refused is not None else 503)
        self.end_headers()
        self.wfile.write(json.dumps({"refused": self.refused}).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), _Router) as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_a_router_that_does_not_answer_takes_nothing_back(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    """One that is slow once is no router whose key fits: reason and events would come and go."""
    woken: list[tuple[str, str]] = []
    asking = Refusals(woken.append, port=port)
    unready = msgspec.structs.replace(pod("r"), role=Role.ROUTER, ip="127.0.0.1", ready=False)
    for refused, wakes, told in (
        (None, 1, False),
        (("10.0.0.7:5570",), 2, True),
        (None, 2, True),
        ((), 3, False),
    ):
        monkeypatch.setattr(_Router, "refused", refused)
        asking._asked[KEY] = float("inf")  # the test alone asks
        asking._ask(KEY, [unready], "token")
        said = asking.known(KEY, [unready], "token").get("r")
        assert (len(woken), "10.0.0.7:5570" in (said.message if said else "")) == (wakes, told)
    asking.close()
