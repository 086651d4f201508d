"""`tandem router`: OpenAI HTTP over workers that are already up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.cli.command import parse
from tandem.cli.flags import Section
from tandem.cli.loading import loading
from tandem.cli.logs import set_up_logging
from tandem.cli.stack_dump import dump_on_signal
from tandem.protocol.settings import setting
from tandem.router.config import RouterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How much to log."""

    log_level: str = setting(
        "info", "Least severe messages to log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "text", "Lines of text, or a JSON object a line.", choices=("text", "json")
    )


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    sections = [Section("Router", RouterConfig), Section("Logging", LogConfig)]
    given: dict[type, dict[str, Any]] = parse("router", __doc__.splitlines()[0], sections, argv)
    log = LogConfig(**given[LogConfig])
    set_up_logging(log.log_level, log.log_format)
    dump_on_signal()
    with loading():
        from tandem.router.app import serve

    serve(RouterConfig(**given[RouterConfig]), log_level=log.log_level)
    return 0
