"""Log lines, as text or JSON, with their request and trace."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

from tandem.base.settings import setting
from tandem.tracing.recording import current

TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s%(about)s"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Settings of the log."""

    log_level: str = setting(
        "info", "Lowest level of messages to log.", choices=("debug", "info", "warning", "error")
    )
    log_format: str = setting(
        "text", "Format of log lines: text, or one JSON object each.", choices=("text", "json")
    )


class About(logging.Filter):
    """Gives each record ``request_id`` and ``trace_id``, its own or the current call's."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            recording = current()
            record.request_id = "" if recording is None else recording.request_id
            record.trace_id = "" if recording is None else recording.watch.trace_id
        request_id, trace_id = getattr(record, "request_id", ""), getattr(record, "trace_id", "")
        about = f" [request {request_id}" if request_id else ""
        if about:
            about += f" trace {trace_id}]" if trace_id else "]"
        record.about = about
        return True


class JsonLines(logging.Formatter):
    """Formatter that writes one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC)
        entry = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in ("request_id", "trace_id"):
            if value := getattr(record, name, ""):
                entry[name] = value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(level: str, log_format: str = "text") -> None:
    """Log to standard error, one line per message."""
    logging.basicConfig(level=level.upper(), handlers=[handler_of(log_format)])


def handler_of(log_format: str) -> logging.Handler:
    """Return a handler for lines of that format on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(About())
    text = logging.Formatter(TEXT, datefmt="%H:%M:%S")
    handler.setFormatter(JsonLines() if log_format == "json" else text)
    return handler
