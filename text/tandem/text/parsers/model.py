"""Parsers of one served model, and the special tokens that they need to see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import ReasoningSpan
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.choose import reasoning_format, tool_format
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.formats import FORCED, REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.opened import is_open
from tandem.text.parsers.tables import ChannelFormat, ReasoningFormat, ToolFormat
from tandem.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParsers:
    """Formats that a model writes; None if it has none, or its format is not known."""

    tools: ToolFormat | ChannelFormat | None = None
    reasoning: ReasoningFormat | ChannelFormat | None = None
    seen: frozenset[int] = frozenset()
    """Special tokens that the text must contain for the formats to be found."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tools: str, reasoning: str) -> ModelParsers:
        """Return the parsers of named formats. ``auto`` derives one from the model's chat
        templates; ``none`` is no format.

        Raises InvalidParameter for two formats that cannot be combined.
        """
        template = tokenizer.chat_templates.text
        called = tool_format(tools, template)
        thought = reasoning_format(reasoning, template)
        tool_table = None if called is None else TOOL_FORMATS[called]
        reasoning_table = None if thought is None else REASONING_FORMATS[thought]
        if tool_table is not None and reasoning_table is not None:
            channels = [isinstance(each, ChannelFormat) for each in (tool_table, reasoning_table)]
            if channels[0] != channels[1]:
                allowed = f"a format that goes with the tool_call_parser {called}"
                raise InvalidParameter("reasoning_parser", thought, allowed)
        tables = (tool_table, reasoning_table)
        marks = [mark for table in tables if table is not None for mark in table.marks]
        seen = {
            token_id
            for token_id in tokenizer.special_ids
            if (token := tokenizer.token_text(token_id).strip()) and any(token in m for m in marks)
        }
        return cls(tools=tool_table, reasoning=reasoning_table, seen=frozenset(seen))

    def begin(
        self, tools: Sequence[Mapping[str, Any]], prompt: str, continued: str = ""
    ) -> StreamParser:
        """Return the parser of one choice that answers ``prompt`` and may call ``tools``, often
        none. ``continued`` is the text of a message that it continues."""
        return StreamParser(
            tools=self.tools if tools else None,
            reasoning=self.reasoning,
            schemas=ToolSchemas.of(tools),
            prompt=prompt,
            continued=continued,
        )

    def begin_forced(
        self, tools: Sequence[Mapping[str, Any]], prompt: str, continued: str = ""
    ) -> StreamParser:
        """Return the parser of an answer that a grammar restricts to a list of calls, after
        reasoning. Arguments as in ``begin``."""
        reasoning = None if isinstance(self.reasoning, ChannelFormat) else self.reasoning
        return StreamParser(
            tools=FORCED,
            reasoning=reasoning,
            schemas=ToolSchemas.of(tools),
            prompt=prompt,
            continued=continued,
        )

    @property
    def thinks(self) -> bool:
        """Return whether ``span`` knows the marks of the model's reasoning."""
        return self.reasoning is not None and not isinstance(self.reasoning, ChannelFormat)

    def span(self, prompt: str, continued: str = "") -> ReasoningSpan | None:
        """Return the reasoning that may precede a structured answer to ``prompt``; None for none.

        An answer that continues a message, ``continued``, begins no reasoning. Models with channels
        answer in the form at once.
        """
        reasoning = self.reasoning
        if reasoning is None or isinstance(reasoning, ChannelFormat):
            return None
        if is_open(reasoning, prompt, continued):
            return ReasoningSpan(close=reasoning.close)
        if continued.strip() or prompt.rstrip().endswith(reasoning.close):
            return None
        return ReasoningSpan(opens=reasoning.opens, close=reasoning.close)
