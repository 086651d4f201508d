"""Listening on all addresses of a machine: `::` means both families if the machine has both.

asyncio and many hosts treat `::` as IPv6 only, and a host without IPv6 cannot bind it.
"""

import ipaddress
import os
import socket

from tandem.protocol.errors import InvalidParameter

REMEDY = "or CURVE keys (--curve-keys, --curve-peers), or --allow-plaintext"
PLAINTEXT_HELP = (
    "Connect to other machines without CURVE: a host that reaches the port may send work, read KV "
    "and drain the worker."
)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is a loopback address or ``localhost``."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def check_exposed(param: str, host: str, *, curve: bool, allow_plaintext: bool) -> None:
    """Raise InvalidParameter for another host without CURVE or ``allow_plaintext``."""
    if not (curve or allow_plaintext or is_loopback(host)):
        raise InvalidParameter(param, host, f"a loopback address, {REMEDY}")


ENV_CHILD_TOKEN = "TANDEM_CHILD_TOKEN"
HEADER_CHILD_TOKEN = "Tandem-Child"


def child_headers() -> dict[str, str]:
    """Return the header for ``/ready``; empty if no supervisor set a token."""
    token = os.environ.get(ENV_CHILD_TOKEN)
    return {HEADER_CHILD_TOKEN: token} if token else {}


ANY_4, ANY_6 = "0.0.0.0", "::"


def listening_host(host: str) -> str:
    """Return the address to bind, without brackets. `::` becomes 0.0.0.0 without IPv6."""
    bare = host.removeprefix("[").removesuffix("]")
    return ANY_4 if bare == ANY_6 and not has_ipv6() else bare


def has_ipv6() -> bool:
    """Return whether a socket can listen on IPv6 on this machine."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ANY_6, 0))
    except OSError:
        return False
    return True


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an address without brackets; IPv4 for a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def take_both_families(listener: socket.socket) -> None:
    """Make an unbound IPv6 socket accept IPv4 too."""
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a TCP socket bound to ``host`` that does not listen yet. Raises OSError."""
    address = listening_host(host)
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        take_both_families(listener)
        listener.bind((address, port))
    except OSError:
        listener.close()
        raise
    return listener
