"""P's half: a thread that keeps this worker's memory registered with the agent of its node.

The agent may come later, end and come again: the incarnation and the secret stay, so that what
consumers know of them stays right.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from pathlib import Path

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import Give, Registered, Rejected, ToWorker
from tandem.kvtransfer.transports.mapped.wire import Given

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0
ANSWER_SECONDS = 5.0


class Giver:
    """Runs from ``start`` to ``stop``."""

    def __init__(self, folder: Path, said: Give, given: Given) -> None:
        """Takes the descriptors over."""
        self._folder, self._said, self._given = folder, said, given
        self.registered = threading.Event()
        """Set while the agent has the memory."""
        self._stop_reader, self._stop_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)

    def start(self) -> None:
        """Register, and stay registered."""
        self._thread.start()

    def stop(self) -> None:
        """End the registration: the agent releases the memory."""
        self._stop_writer.send(b"\0")
        self._thread.join(timeout=5.0)
        self._stop_writer.close()

    def _run(self) -> None:
        pause, told = FIRST_PAUSE_SECONDS, ""
        while True:
            try:
                line = Line(self._folder)
                try:
                    self._register(line)
                    pause, told = FIRST_PAUSE_SECONDS, ""
                    if self._wait(line, None) is not None:
                        raise TransportError("the node's agent says more than it is asked")
                finally:
                    self.registered.clear()
                    line.close()
            except TransportError as error:
                if str(error) != told:  # once, not at each try
                    told = str(error)
                    logger.warning("KV is not given to the node's agent: %s", error)
            except InterruptedError:
                break
            if self._stops(pause):
                break
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        self._given.close()
        self._stop_reader.close()

    def _register(self, line: Line) -> None:
        hello = self._wait(line, ANSWER_SECONDS)
        if hello is None:
            raise TransportError("the node's agent does not answer")
        check_hello(hello)
        if not line.say(self._said, self._given.descriptors):
            raise TransportError("the node's agent takes no registration")
        answer = self._wait(line, ANSWER_SECONDS)
        if isinstance(answer, Rejected):
            raise TransportError(answer.reason)
        if not isinstance(answer, Registered):
            raise TransportError("the node's agent does not answer the registration")
        self.registered.set()
        logger.info("KV of this worker is given to the node's agent")

    def _wait(self, line: Line, seconds: float | None) -> ToWorker | None:
        """Return the next message, or None after the time. Raises TransportError at the line's
        end, InterruptedError when this worker stops."""
        poll = select.poll()
        for each in (line.fileno(), self._stop_reader.fileno()):
            poll.register(each, select.POLLIN)
        ready = dict(poll.poll(None if seconds is None else seconds * 1000))
        if self._stop_reader.fileno() in ready:
            raise InterruptedError
        return line.hear() if ready else None

    def _stops(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._stop_reader, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
