"""The address of the router is tried before anything is prepared."""

from __future__ import annotations

import socket

import pytest

from tandem.cli.serve.listening import LOOPBACK, check_address, free_ports
from tandem.cli.serve.stack import router_url
from tandem.protocol.errors import InvalidParameter


@pytest.mark.parametrize("taken", [LOOPBACK, "0.0.0.0"])
@pytest.mark.parametrize("wanted", [LOOPBACK, "0.0.0.0", "localhost"])
def test_a_port_on_which_another_program_listens_is_refused(taken: str, wanted: str):
    """Whichever of the machine's addresses either of the two has chosen."""
    with socket.create_server((taken, 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InvalidParameter, match=rf"port: {port} .* another program listens"):
            check_address(wanted, port)


def test_a_port_that_nobody_has_is_free_again_at_once():
    (port,) = free_ports(1)
    for _ in range(2):
        check_address(LOOPBACK, port)


@pytest.mark.parametrize("host", ["nonsense.invalid", "203.0.113.7", "a..b", "x" * 300])
def test_a_host_that_is_not_this_machine_is_named(host: str):
    """The words name the field and the value."""
    with pytest.raises(InvalidParameter, match=r"host: .* an address of this machine"):
        check_address(host, 8000)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
        ("[::1]", "http://[::1]:80"),
        ("10.0.0.7", "http://10.0.0.7:80"),
    ],
)
def test_the_url_of_a_router_can_be_opened(host: str, url: str):
    """An IPv6 address stands in brackets, and a wildcard is no address to go to."""
    assert router_url(host, 80) == url
