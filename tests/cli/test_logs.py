"""Lines of logs name the request and the trace that they are about, as text and as JSON."""

from __future__ import annotations

import contextvars
import json
import logging

import pytest

from tandem.cli.settings.logs import handler_of
from tandem.tracing.recording import Recording, begin

TRACE = "0af7651916cd43dd8448eb211c80319c"


def written(log_format: str) -> logging.Logger:
    """A logger whose lines go to standard error."""
    found = logging.getLogger("a")
    found.handlers.clear()
    found.setLevel(logging.INFO)
    found.addHandler(handler_of(log_format))
    return found


def serve(logger: logging.Logger, message: str) -> None:
    recording = Recording("mine", 0.0, traceparent=f"00-{TRACE}-b7ad6b7169203331-01")
    begin(recording)
    logger.info(message)


def test_text_names_request_and_trace(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the call that is served, or of who logs; other lines have neither."""
    logger = written("text")
    contextvars.copy_context().run(serve, logger, "one")
    logger.warning("two", extra={"request_id": "r", "trace_id": ""})
    logger.info("three")
    logger.debug("four")
    one, two, three = capsys.readouterr().err.splitlines()
    assert one.endswith(f" I a: one [request mine trace {TRACE}]")
    assert two.endswith(" W a: two [request r]")
    assert three.endswith(" I a: three")


def test_json_is_an_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """--log-format json: fields instead of words, whatever a message holds."""
    logger = written("json")
    contextvars.copy_context().run(serve, logger, 'a "b"\nc')
    try:
        raise TypeError("what it was")
    except TypeError:
        logger.exception("it failed")
    one, two = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (one["message"], one["level"], one["logger"]) == ('a "b"\nc', "info", "a")
    assert (one["request_id"], one["trace_id"]) == ("mine", TRACE)
    assert "TypeError" in two["exception"]
    assert "request_id" not in two
