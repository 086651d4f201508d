"""Harmony, the format of gpt-oss: messages, each with a channel and a recipient.

A message on the channel ``analysis`` is reasoning, one for ``functions.NAME`` is a call, and any
other is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Protocol

from tandem.text.parsers.calls import Calls
from tandem.text.parsers.cursor import Cursor, literal, scan, spaces, text_until
from tandem.text.parsers.tables import ChannelFormat

_MAX_HEADER = 512
_TO = re.compile(r"\bto=([\w.\-:/]+)")
_CHANNELS = ("analysis", "commentary", "final")
_RECIPIENT = r"(?:\s*to=[^\s<]*)?"


class Sink(Protocol):
    """The parser that messages are read for."""

    thinks: bool

    @property
    def cursor(self) -> Cursor:
        """Return the cursor that is read from."""
        ...

    @property
    def calls(self) -> Calls:
        """Return the writer of calls."""
        ...

    def say(self, text: str) -> None:
        """Write content."""
        ...

    def think(self, text: str) -> None:
        """Write reasoning."""
        ...

    def renew(self) -> None:
        """Mark the start or end of a message."""
        ...


def read_messages(
    sink: Sink, table: ChannelFormat, *, finds_calls: bool
) -> Generator[None, None, None]:
    """Read all messages. The prompt has begun the first one's header."""
    yield
    cursor = sink.cursor
    starts = (table.start, table.channel, *table.ends)
    found = yield from literal(cursor, (" to=", table.start, table.channel))
    while True:
        if found in (table.start, table.channel, " to="):
            lead = found if found != table.start else ""
            found = yield from _message(sink, table, str(lead), finds_calls=finds_calls)
        elif cursor.closed and cursor.pos == len(cursor.text):
            return
        else:
            found = yield from text_until(cursor, starts, sink.say)


def _message(
    sink: Sink, table: ChannelFormat, lead: str, *, finds_calls: bool
) -> Generator[None, None, str | None]:
    """Read one message. Return the mark that ended it."""
    header = [lead]
    cursor = sink.cursor
    ended = yield from text_until(cursor, (table.message,), header.append, _MAX_HEADER)
    written = "".join(header)
    if ended is None:
        # One that the answer's end cut off says nothing; one that is too long is none.
        if len(written) - len(lead) >= _MAX_HEADER or not _begins_header(written, table):
            sink.say(written.removeprefix(lead))
        return None
    _, _, after = written.partition(table.channel)
    channel = re.match(r"\w*", after)
    to = _TO.search(written)
    sink.renew()
    ends = (table.start, table.channel, *table.ends)
    if to is not None and to[1].startswith("functions.") and finds_calls:
        yield from _call(sink, to[1].removeprefix("functions."), ends)
        return (yield from text_until(cursor, ends, sink.say))
    write: Callable[[str], None] = sink.say
    if (channel is not None and channel[0] == "analysis") or (to is not None and finds_calls):
        write, sink.thinks = sink.think, True
    ended = yield from text_until(cursor, ends, write)
    sink.thinks = False
    sink.renew()
    return ended


def _begins_header(written: str, table: ChannelFormat) -> bool:
    """Return whether ``written`` is a header as models write them, or the beginning of one."""
    channel, constrain = re.escape(table.channel), re.escape(table.constrain)
    said = re.match(
        rf"(?:assistant)?{_RECIPIENT}(?:{channel}(?:{'|'.join(_CHANNELS)}))?{_RECIPIENT}"
        rf"(?:\s*{constrain}\w*|\s+json)?",
        written,
    )
    assert said is not None, "it matches nothing, too"
    rest = written[said.end() :].lstrip()
    next_ = ["to=", "json", *(f"{table.channel}{each}" for each in _CHANNELS)]
    return any(each.startswith(rest) for each in (next_ if said.end() else (*next_, "assistant")))


def _call(sink: Sink, name: str, ends: tuple[str, ...]) -> Generator[None, None, None]:
    cursor, calls = sink.cursor, sink.calls
    yield from spaces(cursor)
    calls.begin(name)
    cursor.closes = ends
    if (yield from literal(cursor, ("{",))) is None:
        calls.arguments("{}")
    else:
        cursor.pos -= 1
        yield from scan(cursor, calls.arguments)
    cursor.closes = ()
    calls.end()
    sink.renew()
