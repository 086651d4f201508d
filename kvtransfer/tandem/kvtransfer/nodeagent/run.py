"""The agent's process."""

from __future__ import annotations

import json
import logging
import signal

from tandem.kvtransfer.nodeagent.config import NodeAgentConfig
from tandem.kvtransfer.nodeagent.server import NodeAgent
from tandem.kvtransfer.transports.mapped.wire import open_folder
from tandem.link.descriptors import raise_descriptor_limit

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
