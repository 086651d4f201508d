"""The parsers of one served model, and the special tokens that they must see."""

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
    """The formats that a model writes; None where it has none, or nobody knows it."""

    tools: ToolFormat | ChannelFormat | None = None
    reasoning: ReasoningFormat | ChannelFormat | None = None
    seen: frozenset[int] = frozenset()
    """Special tokens that texts must hold for the formats to be found."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tools: str, reasoning: str) -> ModelParsers:
        """By names, of which ``auto`` asks the model's chat templates and ``none`` is none.

        Raises InvalidParameter for two formats that cannot stand in one text.
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
        """The parser of one choice that answers ``prompt`` and may call ``tools``, often none;
        ``continued`` is the text of a message that it goes on with."""
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
        """As ``begin``, of an answer that a grammar holds to be a list of calls, behind what the
        model thinks."""
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
        """Whether ``span`` knows how the model marks what it thinks."""
        return self.reasoning is not None and not isinstance(self.reasoning, ChannelFormat)

    def span(self, prompt: str, continued: str = "") -> ReasoningSpan | None:
        """What may stand before a form that an answer to ``prompt`` is to have: None for nothing.

        An answer that goes on with a message, ``continued``, begins no thought. Models that write
        channels answer in the form at once.
        """
        reasoning = self.reasoning
        if reasoning is None or isinstance(reasoning, ChannelFormat):
            return None
        if is_open(reasoning, prompt, continued):
            return ReasoningSpan(close=reasoning.close)
        if continued.strip() or prompt.rstrip().endswith(reasoning.close):
            return None
        return ReasoningSpan(opens=reasoning.opens, close=reasoning.close)
