"""`tandem chat` with a server that streams what the test says."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import pytest
from tests.cli.answering import Answer, served

from tandem.cli import chat
from tandem.cli import chat as answer_drawn
from tandem.cli.chat import AnswerDrawn

THOUGHT = [
    {"role": "assistant", "content": ""},
    {"reasoning": "Let me", "reasoning_content": "Let me"},
]
THOUGHT += [{"reasoning_content": " see."}]
SAID = [{"content": "Paris"}, {"content": "."}]
CUT = "cut at 7 tokens; --max-tokens allows more"


@contextmanager
def streaming(deltas: list[Any], reason: str) -> Iterator[tuple[list[str], list[Any]]]:
    """Words of a command that asks such a server, and the bodies that it was sent."""
    events = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    events += [{"choices": [{"delta": {}, "finish_reason": reason}]}]
    lines = [*map(json.dumps, events), "[DONE]"]
    bodies: list[Any] = []

    class Streamed(Answer):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

    with served(Streamed) as url:
        yield ["--url", url, "--model", "m", "--max-tokens", "7"], bodies


def on_terminal(monkeypatch: pytest.MonkeyPatch, name: str = "xterm") -> None:
    """Both outputs are one of that name."""
    monkeypatch.setenv("TERM", name)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)


@pytest.mark.parametrize(
    ("deltas", "reason", "drawn"),
    [
        (THOUGHT + SAID, "stop", "\x1b[2mLet me see.\x1b[0m\n\nParis.\n"),
        (SAID, "stop", "Paris.\n"),
        (SAID, "length", f"Paris. [{CUT}]\n"),
        (THOUGHT, "length", f"\x1b[2mLet me see.\x1b[0m [{CUT}]\n"),
        (SAID + THOUGHT, "stop", "Paris.\n\n\x1b[2mLet me see.\x1b[0m\n"),
    ],
)
def test_a_terminal_shows_thoughts_dim_and_where_an_answer_was_cut(
    deltas: list[Any],
    reason: str,
    drawn: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that thinks for as long as it may had said nothing, and nobody knew why."""
    on_terminal(monkeypatch)
    with streaming(deltas, reason) as (words, _):
        assert chat.run([*words, "Hello"]) == 0
    assert capsys.readouterr() == (drawn, "")


@pytest.mark.parametrize(
    ("deltas", "reason", "said", "aside"),
    [
        (THOUGHT + SAID, "stop", "Paris.\n", "[thought] Let me see.\n"),
        (THOUGHT + SAID, "length", "Paris.\n", f"[thought] Let me see.\n[{CUT}]\n"),
        (THOUGHT, "length", "\n", f"[thought] Let me see.\n[{CUT}]\n"),
        (THOUGHT, "stop", "\n", "[thought] Let me see.\n"),
    ],
)
def test_who_pipes_an_answer_has_it_alone(
    deltas: list[dict[str, Any]],
    reason: str,
    said: str,
    aside: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All else goes to standard error, without controls."""
    with streaming(deltas, reason) as (words, _):
        assert chat.run([*words, "Hello"]) == 0
    assert capsys.readouterr() == (said, aside)


def test_a_terminal_without_dim_has_a_mark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_terminal(monkeypatch, "dumb")
    with streaming(THOUGHT + SAID, "stop") as (words, _):
        assert chat.run([*words, "Hello"]) == 0
    assert capsys.readouterr().out == "[thought] Let me see.\n\nParis.\n"


def test_thoughts_are_no_part_of_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["one", "two", "/quit"])
    monkeypatch.setattr(builtins, "input", lambda _: next(typed))
    with streaming(THOUGHT + SAID, "stop") as (words, bodies):
        assert chat.run(words) == 0
    assert [each["content"] for each in bodies[1]["messages"]] == ["one", "Paris.", "two"]


def test_a_stream_that_breaks_in_a_thought_leaves_no_terminal_dim(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is a line of its own."""
    on_terminal(monkeypatch)
    with streaming([*THOUGHT, None], "stop") as (words, _):
        assert chat.run([*words, "Hello"]) == 1
    drawn, error = capsys.readouterr()
    assert drawn == "\x1b[2mLet me see.\x1b[0m\n"
    assert "the server sent an invalid event" in error


def test_a_terminal_is_not_left_dim(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come just where a thought ends."""
    on_terminal(monkeypatch)
    drawn, write = AnswerDrawn(), answer_drawn._write
    drawn.think("Let me see.")

    def breaks(stream: TextIO, text: str) -> None:
        monkeypatch.setattr(answer_drawn, "_write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(answer_drawn, "_write", breaks)
    with pytest.raises(KeyboardInterrupt):
        drawn.write("Paris")
    drawn.end()
    assert capsys.readouterr().out == "\x1b[2mLet me see.\x1b[0m\n"
