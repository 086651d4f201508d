"""The stat loggers that a program asks for: objects, functions, and lines of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.stat_loggers.base import StatLogger
from tandem.engine.stat_loggers.calling import CallableStatLogger
from tandem.engine.stat_loggers.log_line import LoggingStatLogger
from tandem.engine.stat_loggers.loggers import INTERVAL_S, StatLoggers
from tandem.engine.stat_loggers.report import Report

StatFunction = Callable[[Report], object]


def stat_loggers_of(
    given: Sequence[StatLogger | StatFunction] = (), *, log_interval: float
) -> StatLoggers:
    """Those that are given, and lines of the log every ``log_interval`` seconds, 0 for none."""
    loggers: list[StatLogger] = [
        CallableStatLogger(each) if callable(each) else each for each in given
    ]
    if log_interval:
        loggers.append(LoggingStatLogger())
    return StatLoggers(loggers, interval=log_interval or INTERVAL_S)
