"""Many ends of links at little cost: one socket and one thread that answers at many addresses.

For tests of fleets: what is tested has a link to each address, each is another incarnation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import zmq
from tests.hand_link import HandLink

from tandem.link.sockets import raise_descriptor_limit
from tandem.protocol.ids import Incarnation, new_incarnation
from tandem.protocol.link import read_header

NUM_LINKS = 400
"""Beyond the 341 that ZMQ's default of sockets allows, and beyond 1,023 descriptors."""


class DecodeBatch:
    """``answer(me, payload)`` gives what each frame is answered with, or None."""

    def __init__(
        self, answer: Callable[[Incarnation, bytes], bytes | None], count: int = NUM_LINKS
    ) -> None:
        raise_descriptor_limit(8 * count)
        self._answer = answer
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        ports = [self._socket.bind_to_random_port("tcp://127.0.0.1") for _ in range(count)]
        self.endpoints = [f"127.0.0.1:{port}" for port in ports]
        self._links: dict[bytes, HandLink] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(100):
                continue
            identity, head, payload = self._socket.recv_multipart()
            header = read_header(head)
            known = self._links.get(identity)
            if known is None or header.sequence == 0:
                known = self._links[identity] = HandLink(new_incarnation(), header.source)
            said = self._answer(known.me, payload)
            if said is not None:
                self._socket.send_multipart([identity, known.seal(), said])
        self._socket.close(0)
        self._context.term()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS:"))
    return int(line.split()[1])
