"""`tandem node-agent`: copies KV between workers of this node that see only their own GPU."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tandem.cli.serve.stack_dump import dump_on_signal
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import LogConfig, set_up_logging
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig

if TYPE_CHECKING:
    from tandem.kvtransfer.nodeagent.server import NodeAgent

logger = logging.getLogger(__name__)
NOT_HERE = frozenset({"log_format"})
"""Settings of the log that an agent lacks."""


def run(argv: list[str]) -> int:
    """Serve until a signal; with ``--status``, print the agent's counters."""
    sections = [Section("Node agent", NodeAgentConfig), Section("Logging", LogConfig, NOT_HERE)]
    given: dict[type, dict[str, Any]] = parse("node-agent", __doc__.splitlines()[0], sections, argv)
    config, log = NodeAgentConfig(**given[NodeAgentConfig]), LogConfig(**given[LogConfig])
    set_up_logging(log.log_level)
    if config.status:
        from tandem.kvtransfer.nodeagent.run import status_of

        print(json.dumps(status_of(config)))
        return 0
    from tandem.kvtransfer.nodeagent.run import listen, serve

    dump_on_signal()
    agent = listen(config)
    with _shown(agent, config):
        serve(agent)
    return 0


@contextmanager
def _shown(agent: NodeAgent, config: NodeAgentConfig) -> Iterator[None]:
    """Serve the agent's metrics at ``--probe-port``, if given. Raises OSError."""
    if config.probe_port is None:
        yield
        return
    from prometheus_client import CollectorRegistry

    from tandem.kvtransfer.nodeagent.run import AgentSeries
    from tandem.worker.probes import ProbeServer, ProbeState

    registry = CollectorRegistry()
    registry.register(AgentSeries(agent.status))
    state = ProbeState(
        health=lambda: None,  # its loop is the process
        ready=lambda: None,
        debug=lambda: dict(agent.status()),
        registry=registry,
    )
    server = ProbeServer(config.host, config.probe_port, state)
    server.start()
    logger.info("counters of the agent: http://%s:%d/metrics", config.host, server.port)
    try:
        yield
    finally:
        server.stop()
