"""Asking the agent that runs on this machine; imports little, as it is asked often."""

from __future__ import annotations

import select

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import Counts, Status, ToWorker
from tandem.kvtransfer.transports.mapped.wire import open_folder

STATUS_SECONDS = 2.0


def status_of(config: NodeAgentConfig) -> dict[str, int]:
    """Return the counters of this machine's agent. Raises TransportError if none answers."""
    line = Line(open_folder(config.kv_node_folder))
    try:
        check_hello(_next(line))
        line.say(Status())
        answer = _next(line)
    finally:
        line.close()
    if not isinstance(answer, Counts):
        raise TransportError("the node's agent does not follow the protocol")
    return answer.counts


def _next(line: Line) -> ToWorker:
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    if not poll.poll(STATUS_SECONDS * 1000) or (message := line.hear()) is None:
        raise TransportError(f"the node's agent does not answer within {STATUS_SECONDS:g} s")
    return message
