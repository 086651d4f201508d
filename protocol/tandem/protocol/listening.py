"""Listening on all addresses of a machine: `::` is those of both families, where there are two.

Pods of a cluster have an IPv4 address, an IPv6 one, or both; asyncio and many hosts take `::` for
IPv6 alone, and a host without IPv6 cannot bind it at all.
"""

import socket

ANY_4, ANY_6 = "0.0.0.0", "::"


def listening_host(host: str) -> str:
    """The address to bind for ``host``, without brackets: `::` becomes 0.0.0.0 without IPv6."""
    bare = host.removeprefix("[").removesuffix("]")
    return ANY_4 if bare == ANY_6 and not has_ipv6() else bare


def has_ipv6() -> bool:
    """Whether this machine lets a socket listen on IPv6."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((ANY_6, 0))
    except OSError:
        return False
    return True


def family_of(host: str) -> socket.AddressFamily:
    """Of an address without brackets; names are left to IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def take_both_families(listener: socket.socket) -> None:
    """Have a socket that is not bound yet take IPv4 too, if it is one of IPv6."""
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def bound_socket(host: str, port: int) -> socket.socket:
    """A TCP socket for ``host`` that does not listen yet. Raises OSError."""
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
