"""What `tandem bench` notes of a stream's events."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from tests.cli.answering import Answer, served

from tandem.cli.bench.client import Record, Target, _decoder, _note
from tandem.cli.bench.load import Ask
from tandem.cli.bench.serve import Bounds, drive, parse_goodput, summarize

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("choices", "times"),
    [
        ([{"text": "a"}], 1),
        ([{"text": ""}], 1),
        ([{"delta": {"content": ""}}], 1),
        ([{"text": "", "finish_reason": "stop"}], 1),
        ([], 0),
    ],
)
def test_a_step_without_text_has_its_time(choices: list[dict[str, object]], times: int) -> None:
    """Every chunk with a choice is a step; the one with the usage alone is none."""
    record = Record(1, 0.0)
    _note(record, _decoder.decode(msgspec.json.encode({"choices": choices})), 1.5)

    assert record.times == [1.5] * times


TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server whose answers are ``body``, after which it closes like one that is through."""

    class Said(Answer):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with served(Said) as root:
        yield f"{root}/v1/completions"


def recorded(body: bytes) -> Record:
    """What is noted of one request to such a server."""
    bounds = Bounds(max_concurrency=None, timeout=60.0)
    with answering(body) as url:
        target = Target(url, "m", {}, {})
        load = [Ask(prompt=[1, 2, 3], max_tokens=2)]
        (record,), _ = asyncio.run(drive(target, load, bounds, done=lambda _: None))
    return record


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TEXT + TEXT + USAGE, "ended without [DONE]"),
        (TEXT, "ended without [DONE]"),
        (TEXT + TEXT[:12], "ended without [DONE]"),
        (b"", "ended without [DONE]"),
        (TEXT + TEXT + DONE, "no usage"),
        (USAGE + DONE, "ended without a token"),
        (TEXT + b'data: {"error": "broken"}\n\n', "in the stream: broken"),
    ],
)
def test_an_answer_that_is_not_whole_is_no_success(body: bytes, error: str) -> None:
    """Nor is one whose tokens nobody has counted: throughput and pace would be wrong."""
    assert error in str(recorded(body).error)


@pytest.mark.parametrize(
    "body",
    [
        TEXT + TEXT + USAGE + DONE,
        (TEXT + TEXT + USAGE + DONE).replace(b"\n", b"\r\n"),
        (TEXT + TEXT + USAGE + DONE).replace(b"data: ", b"data:"),
        TEXT + b": still here\n\n" + TEXT.replace(b"data", b"event: x\ndata") + USAGE + DONE,
        TEXT + TEXT + USAGE + DONE.strip(),
    ],
)
def test_events_are_read_as_server_sent_events_are(body: bytes) -> None:
    """Either end of a line, a space or none, comments and names of events."""
    record = recorded(body)
    assert record.error is None
    assert (len(record.times), record.num_tokens) == (2, 2)


@pytest.mark.parametrize(("num_tokens", "share"), [(0, 0.0), (1, 1.0), (3, 1.0), (2, 0.0)])
def test_only_a_single_token_has_no_pace(num_tokens: int, share: float) -> None:
    """An answer without a time per token is within its bound if it has no second one."""
    record = Record(1, 0.0, [0.1, 0.3], num_tokens)
    bounds = parse_goodput(["tpot:150"])
    result = summarize([record], 1.0, goodput=bounds)
    assert result["share_within_bounds"] == share
