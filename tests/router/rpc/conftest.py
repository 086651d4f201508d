"""An app with gRPC and a client of it whose messages are bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from tests.own_ports import own_ports
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.rpc.raw_client import RawClient

Serve = Callable[..., Served]
Make = Callable[..., FakeWorker]


@pytest.fixture
def raw(serve: Serve, decode: Make) -> Iterator[Callable[..., tuple[Served, RawClient]]]:
    """An app with gRPC over a worker, and a client of it."""
    clients: list[RawClient] = []

    def connect(
        worker: FakeWorker | None = None,
        options: Iterable[tuple[str, int]] = (),
        **settings: Any,
    ) -> Any:
        worker = worker or decode()  # first: it takes a port of its own
        (port,) = own_ports(1)
        served = serve(worker, grpc_port=port, **settings)
        clients.append(RawClient(port, options))
        return served, clients[-1]

    yield connect
    for client in clients:
        client.close()
