"""Name lookups on their own threads, so that a slow name server blocks no reads.

``socket.getaddrinfo`` has no deadline, so the caller abandons its thread; there is one for each
name, and a bound on all. Numeric addresses need none.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable

from tandem.kvtransfer.errors import TransportError

RESOLVE_SECONDS = 5.0
MAX_LOOKUPS = 16
"""Maximum number of concurrent lookups, including those that hang."""

Address = tuple[socket.AddressFamily, tuple[object, ...]]
GetAddrInfo = Callable[[str, int], Address]


def first_address(host: str, port: int) -> Address:
    """Return the first address of the system's resolver, without a deadline. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[0]
    return family, address


class Lookup:
    """One lookup; call ``poll``."""

    def __init__(self, host: str, port: int, give_up_at: float) -> None:
        self.host = host
        self.port = port
        self.error: str | None = None
        self._give_up_at = give_up_at
        self._found: Address | None = None

    def poll(self) -> Address | None:
        """Return the address, or None while it is unknown. Raises TransportError if the lookup
        fails."""
        if self._found is not None:
            return self._found
        if self.error is None and time.monotonic() < self._give_up_at:
            return None
        raise TransportError(f"{self.host}: {self.error or 'its address was not resolved in time'}")

    def run(self, ask: GetAddrInfo) -> None:
        """Look the name up and store the answer, in a thread."""
        try:
            self._found = ask(self.host, self.port)
        except (OSError, ValueError, OverflowError) as error:  # or it is no name, no port
            self.error = str(error)


class Resolver:
    """Lookups of one transport; ``ask`` never waits."""

    def __init__(self, ask: GetAddrInfo = first_address, seconds: float = RESOLVE_SECONDS) -> None:
        self._ask = ask
        self._seconds = seconds
        self._busy: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def ask(self, host: str, port: int) -> Lookup:
        """Begin to look ``host`` up; a numeric address is the answer."""
        lookup = Lookup(host, port, time.monotonic() + self._seconds)
        if _is_number(host):
            lookup.run(first_address)
        elif not self._enter(host, port):
            lookup.error = "it, or too many other names, are being looked up already"
        else:
            name = f"kv-resolve-{host}"
            threading.Thread(target=self._run, args=(lookup,), name=name, daemon=True).start()
        return lookup

    def _enter(self, host: str, port: int) -> bool:
        with self._lock:
            if (host, port) in self._busy or len(self._busy) >= MAX_LOOKUPS:
                return False
            self._busy.add((host, port))
            return True

    def _run(self, lookup: Lookup) -> None:
        try:
            lookup.run(self._ask)
        finally:
            with self._lock:
                self._busy.discard((lookup.host, lookup.port))


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
