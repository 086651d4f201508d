"""The node through which a load comes in: whither it sends a connection, and whom it still names.

Read from that node's own kernel, on the cluster of tests/cluster: its connection table says which
pod each connection went to, and kube-proxy's rules say which pods new ones may go to. So no test
has to guess either from times.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Collection, Iterable
from types import TracebackType

from tests.cluster.machines import Machines
from tests.e2e_cluster.attempts import Ends

EVERY_SECONDS = 0.1
READINGS = 3
_ENTRY = re.compile(
    r"\btcp\b.*? src=(\S+) dst=(\S+) sport=(\d+) dport=(\d+) "
    r".*?src=(\S+) dst=\S+ sport=\d+ dport=\d+"
)


def parsed(table: Iterable[str]) -> dict[Ends, str]:
    """Whither each TCP connection of ``nf_conntrack``'s lines goes: who answers its client."""
    found = filter(None, map(_ENTRY.search, table))
    return {(each[1], int(each[3]), each[2], int(each[4])): each[5] for each in found}


class Entry:
    def __init__(self, node: str) -> None:
        self._fleet = Machines.load()
        self._node = node

    def destinations(self) -> dict[Ends, str]:
        """Address of the pod that each TCP connection goes to.

        The kernel counts its way through the table in every read of 4 KiB or so, and passes over
        entries when others went meanwhile: what any of three readings has is there.
        """
        path = f"/proc/{self._fleet.holders[self._node]}/net/nf_conntrack"
        found: dict[Ends, str] = {}
        for _ in range(READINGS):
            with open(path) as table:
                found |= parsed(table)
        return found

    def names(self, address: str) -> bool:
        """Whether new connections may still be sent to a pod's address."""
        rules = self._fleet.inside(self._node, "nft", "list", "table", "ip", "kube-proxy")
        return re.search(rf"\b{re.escape(address)}\b", rules) is not None


class Forgetting:
    """``with Forgetting(entry, addresses) as forgetting``: when the entry names none any more."""

    def __init__(self, entry: Entry, addresses: Collection[str]) -> None:
        self._entry, self._addresses = entry, addresses
        self.moment: float | None = None
        """Of ``time.monotonic``; it is at most one look later than the truth."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="forgetting")

    def __enter__(self) -> Forgetting:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    def _watch(self) -> None:
        while not self._stop.wait(EVERY_SECONDS):
            if not any(self._entry.names(each) for each in self._addresses):
                self.moment = time.monotonic()
                return
