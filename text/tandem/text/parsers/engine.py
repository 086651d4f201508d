"""Streaming parser of every format: text is fed as it arrives, and events are returned.

The events do not depend on how the text is split. Text that may become a mark or a call is held
back. Text that is not a call is content. No text raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Protocol

from tandem.text.parsers.calls import Calls, ToolSchemas, new_call_id
from tandem.text.parsers.cursor import (
    MAX_HELD,
    Cursor,
    Reading,
    at_bound,
    literal,
    scan,
    spaces,
    text_until,
)
from tandem.text.parsers.events import ContentDelta, Event, ReasoningDelta
from tandem.text.parsers.tables import ChannelFormat, ReasoningFormat, ToolFormat


def is_open(reasoning: ReasoningFormat, prompt: str, continued: str = "") -> bool:
    """Return whether an answer to ``prompt`` begins within reasoning.

    ``continued``, the text of a message that it continues, decides alone if given.
    """
    if continued.strip():
        opened = max(continued.rfind(each.rstrip()) for each in reasoning.opens)
        return opened > continued.rfind(reasoning.close)
    end = prompt.rstrip()
    if any(end.endswith(each.rstrip()) for each in reasoning.opens):
        return True
    return reasoning.starts_open and not end.endswith((reasoning.close, *reasoning.answered))


def behind_marks(reasoning: ReasoningFormat, continued: str) -> str:
    """Return the text of a message after its last mark."""
    for mark in (*reasoning.opens, reasoning.close):
        continued = continued.rpartition(mark.rstrip())[2]
    return continued.strip()


_MAX_HEADER = 512
_TO = re.compile(r"\bto=([\w.\-:/]+)")
_CHANNELS = ("analysis", "commentary", "final")
_RECIPIENT = r"(?:\s*to=[^\s<]*)?"


class Sink(Protocol):
    """Parser for which messages are read."""

    thinks: bool

    @property
    def cursor(self) -> Cursor: ...

    @property
    def calls(self) -> Calls: ...

    def say(self, text: str) -> None: ...

    def think(self, text: str) -> None: ...

    def renew(self) -> None:
        """Mark the start or end of a message."""
        ...


def read_messages(
    sink: Sink, table: ChannelFormat, *, finds_calls: bool
) -> Generator[None, None, None]:
    """Read all messages. The prompt has begun the first header."""
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
        # A header that is cut off or too long has no effect.
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
    channel, constrain = re.escape(table.channel), re.escape(table.constrain)
    found = re.match(
        rf"(?:assistant)?{_RECIPIENT}(?:{channel}(?:{'|'.join(_CHANNELS)}))?{_RECIPIENT}"
        rf"(?:\s*{constrain}\w*|\s+json)?",
        written,
    )
    assert found is not None, "it matches nothing, too"
    rest = written[found.end() :].lstrip()
    next_ = ["to=", "json", *(f"{table.channel}{each}" for each in _CHANNELS)]
    return any(each.startswith(rest) for each in (next_ if found.end() else (*next_, "assistant")))


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


class StreamParser:
    """Parser of one choice."""

    def __init__(
        self,
        *,
        tools: ToolFormat | ChannelFormat | None = None,
        reasoning: ReasoningFormat | ChannelFormat | None = None,
        schemas: ToolSchemas | None = None,
        prompt: str = "",
        continued: str = "",
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        """``tools`` is None if calls are not parsed. ``prompt`` decides what is open at the start.

        ``continued``: text of a message that the answer continues; it decides then.
        """
        self._cursor = Cursor()
        self._events: list[Event] = []
        self._held: list[str] = []
        """Text after a call in reasoning, held until its kind is known."""
        self._calls = Calls(
            self._cursor, self._events, schemas or ToolSchemas(), new_id, self._say_held
        )
        self._fresh = True
        """Whether no text was written since the start, the last reasoning or the last call."""
        self._blank = False
        """Whether white space is dropped until other text comes."""
        self.thinks = False
        """Whether the next text is reasoning, as far as is known."""
        channels = next((t for t in (tools, reasoning) if isinstance(t, ChannelFormat)), None)
        if channels is not None:
            self._run = read_messages(self, channels, finds_calls=tools is not None)
        else:
            assert not isinstance(tools, ChannelFormat)
            assert not isinstance(reasoning, ChannelFormat)
            self._tools, self._reasoning = tools, reasoning
            self.thinks = reasoning is not None and is_open(reasoning, prompt, continued)
            self._run = self._read(continued)
        next(self._run)

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    @property
    def calls(self) -> Calls:
        return self._calls

    def feed(self, text: str) -> list[Event]:
        """Return the events that ``text`` makes certain."""
        self._cursor.add(text)
        return self._go_on() if text else []

    def end(self) -> list[Event]:
        """Return the events of the held text. No text follows."""
        self._cursor.closed = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._run, None)
        events = self._events[:]
        self._events.clear()
        return events

    def say(self, text: str) -> None:
        if self._blank or self._fresh:
            bare = text.lstrip()
            if self._blank:
                text = bare
            if bare:
                self._blank = self._fresh = False
        if text:
            self._events.append(ContentDelta(text))

    def think(self, text: str) -> None:
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        if text:
            self._events.append(ReasoningDelta(text))

    def renew(self) -> None:
        """Mark the start or end of reasoning or a call: white space around it is dropped."""
        self._fresh = self._blank = True

    def _read(self, continued: str) -> Generator[None, None, None]:
        yield
        if self.thinks:
            assert self._reasoning is not None
            yield from self._read_thought(goes_on=bool(behind_marks(self._reasoning, continued)))
        tools, reasoning = self._tools, self._reasoning
        while True:
            thoughts = reasoning.opens if reasoning is not None and self._fresh else ()
            if self._fresh and tools is not None and tools.at_start:
                yield from self._read_from_start(tools)
            regions = tools.opens if tools is not None else ()
            # Reasoning may begin as long as no content was written.
            found = yield from self._content_until(thoughts, regions)
            if found in thoughts:
                yield from self._read_thought()
            elif found is not None and tools is not None:
                yield from self._read_region(tools, found, self.say)
            elif self._cursor.closed and self._cursor.pos == len(self._cursor.text):
                return

    def _content_until(
        self, thoughts: tuple[str, ...], regions: tuple[str, ...]
    ) -> Generator[None, None, str | None]:
        cursor = self._cursor
        if thoughts:
            while not (yield from self._spaces()):
                pass
            found = yield from literal(cursor, (*thoughts, *regions))
            if found is not None:
                return found
            if cursor.pos < len(cursor.text):
                self._fresh = self._blank = False
                self.say(cursor.text[cursor.pos])
                cursor.pos += 1
                return None
        return (yield from text_until(cursor, regions, self.say))

    def _spaces(self) -> Reading:
        """Read white space at the start, content unless dropped. Return whether it has ended."""
        start = self._cursor.pos
        self._cursor.mark = start
        yield from spaces(self._cursor)
        kept = self._cursor.mark
        self._cursor.mark = None
        if self._cursor.pos > kept:
            self.say(self._cursor.text[kept : self._cursor.pos])
            return False
        return True

    def _read_thought(self, *, goes_on: bool = False) -> Generator[None, None, None]:
        reasoning, tools = self._reasoning, self._tools
        assert reasoning is not None
        self.thinks = True
        # Some models begin a call without closing their reasoning.
        regions = tools.opens if tools is not None else ()
        if not goes_on:
            self.renew()
            # A prompt may have opened the reasoning that the model opens again.
            yield from spaces(self._cursor)
            yield from literal(self._cursor, reasoning.opens)
        while True:
            found = yield from text_until(self._cursor, (reasoning.close, *regions), self.think)
            if found is None or found == reasoning.close or tools is None:
                break
            if (yield from self._read_region(tools, found, self.think)):
                if not (yield from self._read_behind_call(reasoning, tools)):
                    return
                break
        self.thinks = False
        self.renew()

    def _read_behind_call(self, reasoning: ReasoningFormat, tools: ToolFormat) -> Reading:
        """Read the text after a call in reasoning: reasoning if its end comes, else content.

        Return whether the end came.
        """
        while True:
            marks = (reasoning.close, *tools.opens)
            left = max(0, MAX_HELD - sum(map(len, self._held)))
            found = yield from text_until(self._cursor, marks, self._held.append, left)
            if found == reasoning.close:
                thought = "".join(self._held)
                self._held.clear()
                self.think(thought)
                return True
            if found is None:
                self._say_held()
                return False
            yield from self._read_region(tools, found, self._held.append)

    def _say_held(self) -> None:
        held = "".join(self._held)
        self._held.clear()
        self.say(held)

    def _read_from_start(self, tools: ToolFormat) -> Generator[None, None, None]:
        cursor = self._cursor
        cursor.mark = cursor.pos
        yield from spaces(cursor)
        found = yield from literal(cursor, tools.at_start)
        if found is None:
            self._give_back(self.say)
            return
        start = cursor.pos - len(found)
        cursor.pos = start
        self._fresh = False
        yield from self._read_calls(tools, "", self.say)

    def _read_region(
        self, tools: ToolFormat, opened: str, give_back: Callable[[str], None]
    ) -> Reading:
        self._cursor.mark = self._cursor.pos - len(opened)
        return (yield from self._read_calls(tools, opened, give_back))

    def _read_calls(
        self, tools: ToolFormat, opened: str, give_back: Callable[[str], None]
    ) -> Reading:
        cursor, calls, before = self._cursor, self._calls, self._calls.count
        in_list = whole = False
        cursor.opens = tuple(dict.fromkeys((*tools.opens, *tools.call_opens)))
        cursor.closes = tuple(filter(None, (tools.call_close, *tools.closes)))
        if tools.listed:
            yield from spaces(cursor)
            in_list = (yield from literal(cursor, ("[",))) is not None
        is_region = not (tools.needs_list and not in_list)
        call_open: str | None = opened if opened in tools.call_opens else None
        while is_region:
            yield from spaces(cursor)
            if tools.call_opens and call_open is None:
                call_open = yield from literal(cursor, tools.call_opens)
                if call_open is None:
                    break
            whole = yield from tools.body.read(cursor, calls)
            if calls.open:
                calls.end()
                self.renew()
                self.thinks = False
                # An incomplete call ends at a bound, and the next one may follow.
                whole = whole or (yield from at_bound(cursor))
            if not whole:
                break
            cursor.mark = cursor.pos
            yield from spaces(cursor)
            if tools.call_close:
                yield from literal(cursor, (tools.call_close,))
                cursor.mark = cursor.pos
                yield from spaces(cursor)
            call_open = None
            if in_list:
                after = yield from literal(cursor, (",", "]"))
                if after != ",":
                    break
            elif not tools.call_opens and (yield from literal(cursor, tools.separators)) is None:
                break
        cursor.opens = cursor.closes = ()
        if calls.count > before:
            yield from self._read_end(tools, whole=whole)
            return True
        self._give_back(give_back)
        return False

    def _read_end(self, tools: ToolFormat, *, whole: bool) -> Generator[None, None, None]:
        """Read the end of a region with calls.

        Text after the last call is read again. At the answer's end, a separator is dropped.
        """
        cursor = self._cursor
        if not whole and cursor.mark is not None:
            separates = ("", *tools.separators, *("," for _ in range(tools.listed)))
            if not cursor.closed or cursor.text[cursor.mark :].strip() not in separates:
                cursor.pos = cursor.mark
        else:
            yield from spaces(cursor)
            yield from literal(cursor, tools.closes)
        cursor.mark = None

    def _give_back(self, give_back: Callable[[str], None]) -> None:
        cursor = self._cursor
        if cursor.mark is not None:
            held = cursor.text[cursor.mark : cursor.pos]
            cursor.mark = None
            give_back(held)
