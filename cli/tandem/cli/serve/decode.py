"""`tandem decode`: a decode worker. It loads KV from prefill workers, or serves whole requests."""

from __future__ import annotations

from tandem.cli.serve.own_server import loading
from tandem.cli.serve.stack_dump import dump_on_signal
from tandem.cli.settings.command import parse
from tandem.cli.settings.logs import set_up_logging
from tandem.cli.settings.worker_settings import engine_config, handoff_config, worker_sections
from tandem.engine.threads import spin_briefly
from tandem.worker.server_config import QUEUE_LIMITS, ServerConfig


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    given = parse("decode", __doc__.splitlines()[0], worker_sections(), argv)
    server = ServerConfig(**given[ServerConfig])
    set_up_logging(server.log_level, server.log_format)
    dump_on_signal()
    spin_briefly()
    kv = handoff_config(given, server)
    config = engine_config(given, **QUEUE_LIMITS)  # before torch: refuse what cannot be served
    with loading():
        from tandem.decode import worker

    return worker.run(config, server, kv)
