"""`tandem node-agent`: copies KV between workers of this node that see only their own GPU."""

from __future__ import annotations

import json
from typing import Any

from tandem.cli.command import parse
from tandem.cli.flags import Section
from tandem.cli.logs import set_up_logging
from tandem.cli.router import LogConfig
from tandem.cli.stack_dump import dump_on_signal
from tandem.kvtransfer.nodeagent.config import NodeAgentConfig


def run(argv: list[str]) -> int:
    """Serve until a signal; or, with ``--status``, print what the agent has counted."""
    sections = [Section("Node agent", NodeAgentConfig), Section("Logging", LogConfig)]
    given: dict[type, dict[str, Any]] = parse("node-agent", __doc__.splitlines()[0], sections, argv)
    config, log = NodeAgentConfig(**given[NodeAgentConfig]), LogConfig(**given[LogConfig])
    set_up_logging(log.log_level, log.log_format)
    if config.status:
        from tandem.kvtransfer.nodeagent.asked import status_of

        print(json.dumps(status_of(config)))
        return 0
    from tandem.kvtransfer.nodeagent.run import serve

    dump_on_signal()
    serve(config)
    return 0
