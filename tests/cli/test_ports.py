"""Ports that stay free until their process listens."""

import random
import socket

import pytest

from tandem.cli.serve import listening
from tandem.cli.serve.listening import FIRST, LOOPBACK, first_of_connections, free_ports
from tandem.protocol.errors import TandemError


def test_they_differ_and_no_connection_is_given_one():
    """All below the range from which the kernel serves connections."""
    found = free_ports(50)
    assert len(set(found)) == 50
    with socket.create_server((LOOPBACK, 0)) as server:
        given = server.getsockname()[1]
    assert FIRST <= min(found) <= max(found) < first_of_connections() <= given


def test_a_taken_port_is_passed_over(monkeypatch):
    """Somebody listens on the first that is looked at."""
    with socket.socket() as taken:
        (port,) = free_ports(1)
        taken.bind((LOOPBACK, port))
        taken.listen()
        draw = random.sample
        monkeypatch.setattr(random, "sample", lambda *args: [port, *draw(*args)])
        assert port not in free_ports(2)
    assert port not in free_ports(2, but={port})


def test_too_few_are_an_error(monkeypatch):
    monkeypatch.setattr(random, "sample", lambda *_: [])
    with pytest.raises(TandemError, match="only 0 ports are free, 3 are needed"):
        free_ports(3)


@pytest.mark.parametrize(
    ("text", "first"), [("20000\t60999\n", 20000), ("1024\t65535\n", 32768), ("", 32768)]
)
def test_where_connections_begin(monkeypatch, tmp_path, text, first):
    """A range that leaves nothing below it is not believed, nor is an empty file."""
    path = tmp_path / "range"
    path.write_text(text)
    monkeypatch.setattr(listening, "_RANGE_OF_CONNECTIONS", path)
    assert first_of_connections() == first
    monkeypatch.setattr(listening, "_RANGE_OF_CONNECTIONS", tmp_path / "none")
    assert first_of_connections() == 32768
