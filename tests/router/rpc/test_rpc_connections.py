"""Connections of gRPC: how many there are, and how long one may send nothing."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest
from tests.router.rpc.raw_client import RawClient, asked
from tests.waiting import wait_for

from tandem.router.api.grpc import server

OK = grpc.StatusCode.OK
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
WRONG_WINDOW_UPDATE = b"\0\0\4\x08\0\0\0\0\0\0\0\0\0"


def closed(wire: socket.socket) -> bool:
    """Read until the server closes the connection."""
    try:
        while wire.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


@pytest.mark.parametrize("sent", [b"", PREFACE, PREFACE[:5]])
def test_a_connection_that_sends_nothing_more_is_closed(raw: Any, sent: bytes) -> None:
    """After the time that a head of HTTP has."""
    _, client = raw(header_timeout=0.3)
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as wire:
        wire.sendall(sent)
        assert closed(wire)


@pytest.mark.parametrize(
    "sent", [PREFACE + SETTINGS + WRONG_WINDOW_UPDATE, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
)
def test_a_connection_that_sends_no_http2_is_closed(raw: Any, sent: bytes) -> None:
    _, client = raw(header_timeout=20.0)
    with socket.create_connection(("127.0.0.1", client.port), timeout=20) as wire:
        wire.sendall(sent)
        assert closed(wire)
    assert client.status(asked())[0] is OK


def test_connections_beyond_the_bound_are_refused(raw: Any) -> None:
    _, client = raw(max_connections=2)
    first, second = client, RawClient(client.port)
    assert first.status(asked())[0] is second.status(asked())[0] is OK
    third = RawClient(client.port)
    assert third.status(asked())[0] is grpc.StatusCode.UNAVAILABLE
    second.close()

    def is_answered() -> bool:
        fourth = RawClient(client.port)
        try:
            return fourth.status(asked())[0] is OK
        finally:
            fourth.close()

    wait_for(is_answered)
    assert first.status(asked())[0] is OK
    third.close()


def test_a_connection_without_calls_is_closed_in_time(raw: Any) -> None:
    """It holds no place after the time in which HTTP's next request must begin."""
    _, client = raw(max_connections=1, keep_alive_timeout=0.3)
    assert client.status(asked())[0] is OK

    def is_answered() -> bool:
        other = RawClient(client.port)
        try:
            return other.status(asked())[0] is OK
        finally:
            other.close()

    wait_for(is_answered)


def test_a_connection_is_replaced_and_its_calls_are_answered(
    raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client sees no error of it."""
    monkeypatch.setattr(server, "_MAX_AGE", 0.05)
    _, client = raw()
    for _ in range(20):
        assert client.status(asked(stream=True))[0] is OK
