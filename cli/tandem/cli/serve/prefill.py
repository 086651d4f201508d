"""`tandem prefill`: a prefill worker. It computes prompts and hands their KV over."""

from __future__ import annotations

from tandem.cli.serve.own_server import loading
from tandem.cli.serve.stack_dump import dump_on_signal
from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import set_up_logging
from tandem.cli.settings.worker_settings import engine_config, handoff_config, worker_sections
from tandem.engine.threads import spin_briefly
from tandem.prefill.config import PrefillConfig
from tandem.worker.server_config import QUEUE_LIMITS, ServerConfig


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    sections = [*worker_sections(), Section("Prefill", PrefillConfig)]
    given = parse("prefill", __doc__.splitlines()[0], sections, argv)
    server = ServerConfig(**given[ServerConfig])
    set_up_logging(server.log_level, server.log_format)
    dump_on_signal()
    spin_briefly()
    kv, prefill = handoff_config(given, server), PrefillConfig(**given[PrefillConfig])
    config = engine_config(given, **QUEUE_LIMITS)  # before torch: refuse what cannot be served
    with loading():
        from tandem.prefill import worker

    return worker.run(config, server, kv, prefill)
