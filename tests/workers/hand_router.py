"""The router's end of a link, driven by hand."""

from __future__ import annotations

import time
from typing import Any

import zmq
from tests.hand_link import HandLink
from tests.waiting import Deadline

from tandem.link.sockets import decode_to_router
from tandem.protocol.card import PROTOCOL_VERSION
from tandem.protocol.ids import new_incarnation
from tandem.protocol.link import read_header
from tandem.protocol.messages import Beat, Hello, ToWorker, Welcome, encode

WAIT_MS = 20_000
BEAT_SECONDS = 1.0


def dealer(endpoint: str) -> zmq.Socket[bytes]:
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 1000)
    made.connect(endpoint)
    return made


class Router:
    """One end of a link, driven by hand."""

    def __init__(self, endpoint: str) -> None:
        self.link = HandLink(new_incarnation())
        self.socket = dealer(endpoint)
        self._said = 0.0

    def say(self, message: ToWorker) -> None:
        self.socket.send_multipart([self.link.seal(), encode(message)])
        self._said = time.monotonic()

    def hear(self, kind: Any) -> Any:
        """The next message of a kind; others are passed over. Who hears long also beats: a silent
        router is forgotten, and a slow worker may take longer than that."""
        for _ in range(5000):
            self._wait(kind)
            header, payload = self.socket.recv_multipart()
            self.link.accept(read_header(header))
            message = decode_to_router(payload)
            if isinstance(message, kind):
                return message
        raise AssertionError(f"no {kind} came among many others")

    def _wait(self, kind: Any) -> None:
        deadline = Deadline(WAIT_MS / 1000, every=BEAT_SECONDS)
        while True:
            if self.link.is_met and time.monotonic() - self._said > BEAT_SECONDS:
                self.say(Beat())
            if self.socket.poll(int(BEAT_SECONDS * 1000)):
                return
            deadline.check(lambda: f"no {kind}")

    def greet(self) -> None:
        self.say(Hello(PROTOCOL_VERSION))
        self.hear(Welcome)
