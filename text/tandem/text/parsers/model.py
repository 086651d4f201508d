"""Parsers of one served model, and the special tokens that they require."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import ReasoningSpan
from tandem.text.chat_template import FORMAT, knows_no_tools
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser, is_open
from tandem.text.parsers.formats import FORCED, REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.tables import ChannelFormat, ReasoningFormat, ToolFormat
from tandem.text.tokenizer import Tokenizer

AUTO = "auto"
NONE = "none"

_TOOLS = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_xml"),
    (("<function=",), NONE),  # Arguments in JSON follow, which no table reads.
    (("<arg_key>",), "glm45"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_json"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters": dictionary of argument name',), "llama3_json"),
    (("[func_name1(",), "pythonic"),
)
"""Texts that identify a format if a template contains all; the first match counts."""

_REASONING = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("</seed:think>",), "seed_oss"),
    (("<channel|>",), "gemma4"),
    (("<arg_key>", "</think>"), "glm45"),
    (("<minimax:tool_call>", "</think>"), "minimax_m2"),
    (("<｜Assistant｜><think>",), "deepseek_r1"),
    (("<|im_middle|>", "</think>"), "kimi_k2"),
    (("</think>",), "qwen3"),
)


def tool_format(asked: str, template: str) -> str | None:
    """Return the name of the format of calls: ``asked``, or the template's; None for none.

    If a template does not support tools, calls are text in ``FORMAT``.
    """
    if asked == AUTO and template and knows_no_tools(template):
        return FORMAT
    return _choose(asked, template, _TOOLS)


def reasoning_format(asked: str, template: str) -> str | None:
    """Return the name of the format of reasoning, as ``tool_format``."""
    return _choose(asked, template, _REASONING)


def check_name(param: str, asked: str, known: Mapping[str, object]) -> None:
    """Raise InvalidParameter for an unknown name."""
    if asked not in (AUTO, NONE, *known):
        raise InvalidParameter(param, asked, f"one of {', '.join((AUTO, NONE, *sorted(known)))}")


def _choose(
    asked: str, template: str, known: tuple[tuple[tuple[str, ...], str], ...]
) -> str | None:
    if asked != AUTO:
        return None if asked == NONE else asked
    for texts, name in known:
        if all(text in template for text in texts):
            return None if name == NONE else name
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParsers:
    """Formats that a model writes; None if there is none."""

    tools: ToolFormat | ChannelFormat | None = None
    reasoning: ReasoningFormat | ChannelFormat | None = None
    seen: frozenset[int] = frozenset()
    """Special tokens that the formats require in the text."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, *, tools: str, reasoning: str) -> ModelParsers:
        """Return the parsers of named formats; ``auto`` uses the model's chat templates.

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
        """Return the parser of one choice that answers ``prompt`` and may call ``tools``.

        ``continued`` is the text of a message that it continues.
        """
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
        """Return the parser of an answer that a grammar restricts to a list of calls."""
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
        """Return the reasoning that may precede a structured answer; None for none.

        An answer that continues a message, or of a model with channels, has none.
        """
        reasoning = self.reasoning
        if reasoning is None or isinstance(reasoning, ChannelFormat):
            return None
        if is_open(reasoning, prompt, continued):
            return ReasoningSpan(close=reasoning.close)
        if continued.strip() or prompt.rstrip().endswith(reasoning.close):
            return None
        return ReasoningSpan(opens=reasoning.opens, close=reasoning.close)
