"""Words of clients and workers reach a terminal as text: no markup, no control, no command."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.cli.test_top import call, fleet, link, worker

from tandem.cli.inspect import explain
from tandem.cli.inspect.top import Frame, calls_table, drawn
from tandem.router.observe.timeline.view import full
from tandem.tracing.recording import AttemptRecord, LegRecord, Recording

TITLE = "\x1b]0;mine\x07"
"""Would name a terminal's window."""


def shown(what: Any) -> str:
    console = Console(width=200, file=io.StringIO(), force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


@pytest.mark.parametrize("name", ["[/x]", "[red]x", "[link=x]", "\x1b[2J", "\u202egpj"])
def test_a_calls_name_is_drawn_as_it_is(name: str) -> None:
    """An id that closes a tag ended every view of the router with an error."""
    text = shown(calls_table([call(request_id=name, path=f"/v1/{TITLE}{name}")]))
    assert explain.plain(name)[:8] in text
    assert text.replace("\n", "").isprintable()
    assert r"\x1b]0;mine\x07" in text


def test_names_and_reasons_of_workers_are_drawn_as_they_are() -> None:
    """Also those of which a fleet says that nobody answers there."""
    odd = f"[/x]{TITLE}"
    said = fleet(
        [worker("decode", 1, pod=odd, model=odd, health=odd)],
        [link(1, 1, reason=odd, transport=odd)],
        links={odd: "greeting"},
    )
    text = shown(drawn(Frame("http://r", "12:00:00", said, []), None))
    assert text.replace("\n", "").isprintable()
    assert text.count(explain.plain(odd)) >= 6


def test_explain_draws_nothing_that_a_terminal_obeys() -> None:
    """A path is decoded by the router; a failure may quote a worker."""
    recording = Recording("a", 0.0, path=f"/v1/{TITLE}", status=404, ended=1.0)
    legs = [LegRecord("decode", f"D\r{TITLE}", 0.1)]
    recording.attempt(AttemptRecord(0, TITLE, "first", 0.1, legs, 0.9, f"lost\n{TITLE}"))
    content = msgspec.json.decode(msgspec.json.encode(full(recording, 1.0)))
    text = explain.drawn(content, 100)
    assert text.startswith(r"/v1/\x1b]0;mine\x07  a  status 404")
    assert text.replace("\n", "").isprintable()
    assert r"lost\n\x1b]0;mine\x07" in text


def test_printable_words_stay() -> None:
    assert explain.plain("chat/completions Frühstück 朝食 → [a]") == (
        "chat/completions Frühstück 朝食 → [a]"
    )
    assert explain.plain("a\ud800b\u2028") == r"a\ud800b\u2028"
