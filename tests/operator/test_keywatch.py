"""Pods are asked for their keys where their own revision listens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import msgspec
import pytest
from tests.operator.test_decisions import pod

from tandem.cli.serve.listening import free_ports
from tandem.operator.desired.naming import Role
from tandem.operator.probes.keywatch import PodAccess, read_keys


class _Worker(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"keys": ["router.2"]}).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def listening() -> Iterator[int]:
    """Port of a worker that says which keys it has."""
    with HTTPServer(("127.0.0.1", 0), _Worker) as server:
        serving = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_a_worker_of_another_port_is_asked_at_its_own(listening: int):
    """The spec's port is that of pods to come: those that run may have another until they go."""
    (silent,) = free_ports(1)
    worker = msgspec.structs.replace(pod("old"), ip="127.0.0.1")
    for access in (
        PodAccess(silent, {(Role.DECODE, "r"): listening}, ""),
        PodAccess(listening, {(Role.DECODE, "another"): silent}, ""),
    ):
        assert read_keys(worker, access) == frozenset({"router.2"})
