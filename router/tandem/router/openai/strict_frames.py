"""Forms of a whole answer, by the tags of the calls that may be in it.

A format marks calls by a mark anywhere, by the beginning of the answer, or by the header of a
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.text.parsers.tables import ChannelFormat, StartText, ToolFormat

Form = dict[str, Any]
Tag = msgspec.Raw
"""A tag in JSON: it may be large, and is written once."""
NOTHING: Form = {"type": "const_string", "value": ""}
_BLANKS: Form = {"type": "regex", "pattern": r"[ \t\r\n]{0,8}"}


def copies_of(format_: ToolFormat | ChannelFormat) -> int:
    """Return the number of copies of each tag in the form."""
    start = format_.start if isinstance(format_, ToolFormat) else None
    return 1 if start is None else 1 + len(start.marks)


def whole_form(
    format_: ToolFormat | ChannelFormat,
    tags: Sequence[Tag],
    *,
    parallel: bool,
    words: Form | None = None,
) -> Form:
    """Return the form of answers whose calls are those of ``tags``.

    ``words``: the form of an answer without calls; None if any text will do.
    """
    if isinstance(format_, ChannelFormat):
        return _of_messages(format_, tags, words or {"type": "any_text"})
    if words is not None:
        return _or(_calls_alone(format_, tags, parallel=parallel), words)
    if format_.start is not None:
        return _from_start(format_.start, tags, parallel=parallel)
    return {
        "type": "triggered_tags",
        "triggers": [each.trigger for each in format_.texts],
        "tags": [*tags],
        "stop_after_first": not parallel,
    }


def _calls_alone(format_: ToolFormat, tags: Sequence[Tag], *, parallel: bool) -> Form:
    """Return the form of calls and nothing else."""
    if format_.start is not None:
        return _begun(format_.start, tags, parallel=parallel)
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _begun(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    """Return the form of calls that begin the answer, with or without a mark."""
    marks = [_const(mark) for mark, _ in start.marks]
    closers = [_const(closer) for _, closer in start.marks if closer]
    region = _region(start, tags, parallel=parallel)
    return _sequence(_BLANKS, _or(NOTHING, *marks), region, _or(NOTHING, *closers))


def _region(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    calls = {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": start.separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }
    return _sequence(_const(start.open), calls, _const(start.close))


def _from_start(start: StartText, tags: Sequence[Tag], *, parallel: bool) -> Form:
    """Return the form of calls that begin the answer, or of words with calls after a mark."""
    begun = _begun(start, tags, parallel=parallel)
    region = _region(start, tags, parallel=parallel)
    marked = [
        {"begin": mark, "content": region, "end": closer or ""} for mark, closer in start.marks
    ]
    words = {
        "type": "triggered_tags",
        "triggers": [mark for mark, _ in start.marks],
        "tags": marked,
        "stop_after_first": not parallel,
    }
    # Grammars read token by token of their own: both ways begin with the same text, if they do.
    starts = [_sequence(_const(text), _regex(pattern)) for text, pattern in start.words]
    return _or(begun, _sequence(_BLANKS, _or(*starts), words), NOTHING)


def _of_messages(format_: ChannelFormat, tags: Sequence[Tag], words: Form) -> Form:
    """Return the form of thoughts and words in own messages, then a call or the last words."""
    spoken = [
        {
            "begin": f"{format_.channel}{channel}{format_.message}",
            "content": {"type": "any_text"},
            "end": format_.end,
        }
        for channel in ("analysis", "commentary")
    ]
    next_message = f"{format_.start}assistant"
    before = {
        "type": "tags_with_separator",
        "tags": spoken,
        "separator": next_message,
        "at_least_one": True,
    }
    call = {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": "",
        "at_least_one": True,
        "stop_after_first": True,
    }
    final = _const(f"{format_.channel}final{format_.message}")
    last = _or(call, _sequence(final, words))
    return _sequence(_or(NOTHING, _sequence(before, _const(next_message))), last)


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _const(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": [each for each in elements if each != NOTHING]}


def _or(*elements: Form) -> Form:
    return {"type": "or", "elements": [*elements]}
