"""Process of the node agent."""

from __future__ import annotations

import json
import logging
import select
import signal
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.kvtransfer.errors import TransportError
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.kvtransfer.nodeagent.server import NodeAgent
from tandem.kvtransfer.transports.agent.line import Line, check_hello
from tandem.kvtransfer.transports.agent.wire import (
    Counts,
    Fault,
    Status,
    ToWorker,
)
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.link.sockets import raise_descriptor_limit

STATUS_SECONDS = 2.0


def status_of(config: NodeAgentConfig) -> dict[str, int]:
    """Return the counters of this machine's agent. Raises TransportError if none answers."""
    line = Line(open_folder(config.kv_node_folder))
    try:
        check_hello(_next(line))
        line.send_message(Status())
        answer = _next(line)
    finally:
        line.close()
    if not isinstance(answer, Counts):
        raise TransportError("the node's agent does not follow the protocol")
    return answer.counts


def _next(line: Line) -> ToWorker:
    poll = select.poll()
    poll.register(line.fileno(), select.POLLIN)
    if not poll.poll(STATUS_SECONDS * 1000) or (message := line.receive()) is None:
        raise TransportError(f"the node's agent does not answer within {STATUS_SECONDS:g} s")
    return message


_Family = CounterMetricFamily | GaugeMetricFamily
_LOST = {
    "garbage": "garbage",
    "stranger": "strangers",
    "full": "turned away",
    "rejected": "rejected",
}
"""Counters of the agent by label value."""


class AgentSeries(Collector):
    """Metrics built from the agent's counters at each scrape."""

    def __init__(self, status: Callable[[], Mapping[str, int]]) -> None:
        """``status`` answers from any thread, with what `tandem node-agent --status` prints."""
        self._status = status

    def describe(self) -> Iterator[_Family]:
        yield from _families(None)

    def collect(self) -> Iterator[_Family]:
        yield from _families(self._status())


def _families(now: Mapping[str, int] | None) -> Iterator[_Family]:
    copies = CounterMetricFamily(
        "tandem:kv_agent_copies",
        "Copies that the node's agent made for decode workers, one for each landing slot.",
    )
    copied = CounterMetricFamily("tandem:kv_agent_copied_bytes", "KV bytes that the agent copied.")
    refused = CounterMetricFamily(
        "tandem:kv_agent_refused",
        "Refused copies, by reason.",
        labels=["reason"],
    )
    lost = CounterMetricFamily(
        "tandem:kv_agent_callers_lost",
        "Callers that the agent disconnected: garbage (a broken or silent protocol), "
        "stranger (a user who may not call), full (no room for more), rejected (memory or a name "
        "that cannot be registered).",
        labels=["reason"],
    )
    workers = GaugeMetricFamily(
        "tandem:kv_agent_workers",
        "Workers that are registered with the node's agent: producers, whose blocks it reads, and "
        "consumers, into whose landing slots it writes.",
        labels=["role"],
    )
    pending = GaugeMetricFamily(
        "tandem:kv_agent_copies_pending",
        "Requested copies that have not finished.",
        labels=["state"],
    )
    if now is not None:
        copies.add_metric([], now["copies"])
        copied.add_metric([], now["bytes"])
        for fault in Fault:
            word = fault.name.lower()
            refused.add_metric([word], now[f"refused: {word}"])
        for word, counted in _LOST.items():
            lost.add_metric([word], now[counted])
        for role in ("producer", "consumer"):
            workers.add_metric([role], now[f"{role}s"])
        for state in ("waiting", "under way"):
            pending.add_metric([state.replace(" ", "_")], now[state])
    yield from (copies, copied, refused, lost, workers, pending)


logger = logging.getLogger(__name__)


def listen(config: NodeAgentConfig) -> NodeAgent:
    """Return the agent, listening. Raises TransportError if the folder or socket cannot be used."""
    raise_descriptor_limit()
    return NodeAgent(open_folder(config.kv_node_folder), config.agent_group)


def serve(agent: NodeAgent) -> None:
    """Run until SIGTERM or SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    logger.info("the agent listens at %s", agent.path)
    agent.run()
    logger.info("the agent ends: %s", json.dumps(agent.counts))
