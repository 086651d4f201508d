"""`tandem operator`: turns LLMServices of a Kubernetes cluster into routers and workers."""

from __future__ import annotations

from tandem.cli.settings.command import parse
from tandem.cli.settings.flags import Section
from tandem.cli.settings.logs import LogConfig, set_up_logging
from tandem.operator.settings import OperatorSettings, with_timings


def run(argv: list[str]) -> int:
    """Serve until a signal."""
    sections = [Section("Operator", OperatorSettings), Section("Logging", LogConfig)]
    given = parse("operator", __doc__.splitlines()[0], sections, argv)
    log = LogConfig(**given[LogConfig])
    set_up_logging(log.log_level, log.log_format)
    from tandem.operator.run import run as serve

    return serve(OperatorSettings(**with_timings(given[OperatorSettings])))
