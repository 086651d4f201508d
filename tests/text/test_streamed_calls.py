"""Calls come as they are written, in every format: nothing of them waits for the answer's end."""

from __future__ import annotations

import pytest
from tests.text.parser_streams import WRITERS, Call
from tests.text.test_parsers import Said, parser

from tandem.text.parsers.formats import TOOL_FORMATS

WORDS = "all of these words are one text; " * 30
NAMES = {
    **{name: name for name in WRITERS},
    "glm47": "glm45",
    "nemotron_v3": "qwen3_xml",
    "llama4_pythonic": "pythonic",
}
"""``--tool-call-parser`` to whom writes for it."""
WHOLE = ("pythonic", "llama4_pythonic")
"""Their calls come at once."""


def test_every_format_is_tried() -> None:
    assert NAMES.keys() == TOOL_FORMATS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_what_stands_behind_a_call_is_told_before_the_end(name: str) -> None:
    """And the call itself with all of its arguments: some waited for the answer's end."""
    calls: list[Call] = [("f", {"text": WORDS, "count": 5}), ("get_weather", {"text": "a"})]
    stream, said = parser(name), Said()
    for char in WRITERS[NAMES[name]]("", calls):
        said.take(stream.feed(char))

    assert said.meant == calls
    assert said.open == 0
    said.take(stream.feed(" Bye <b> now"))
    assert said.content == "Bye <b> now"
    said.take(stream.end())
    assert said.content == "Bye <b> now"


@pytest.mark.parametrize("name", sorted(NAMES.keys() - set(WHOLE)))
def test_a_text_comes_piece_by_piece(name: str) -> None:
    """However little of it has come."""
    written = WRITERS[NAMES[name]]("", [("f", {"text": WORDS})])
    begun = written.index(WORDS)
    stream, said = parser(name), Said()
    said.take(stream.feed(written[:begun]))
    for at in range(0, len(WORDS), 10):
        said.take(stream.feed(WORDS[at : at + 10]))
        ((_, called, arguments),) = said.calls
        assert called == "f"
        assert arguments.endswith(WORDS[: at + 10])
