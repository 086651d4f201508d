"""Choice of a model's formats, by name or from texts in its chat template."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.protocol.errors import InvalidParameter
from tandem.text.tools_in_words import FORMAT, knows_no_tools

AUTO = "auto"
NONE = "none"

_TOOLS = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_xml"),
    (("<function=",), NONE),  # with arguments in JSON behind it, which no table here reads
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
"""Texts that identify a format if a template contains all. The first match counts."""

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
    """Return the name of the format of calls: ``asked``, or the one in the template; None for none.
    If a template does not support tools, they are written as text, in ``FORMAT``."""
    if asked == AUTO and template and knows_no_tools(template):
        return FORMAT
    return _choose(asked, template, _TOOLS)


def reasoning_format(asked: str, template: str) -> str | None:
    """Return the name of the format of reasoning, as ``tool_format``."""
    return _choose(asked, template, _REASONING)


def check_name(param: str, asked: str, known: Mapping[str, object]) -> None:
    """Raise InvalidParameter that lists the known names, for an unknown name."""
    if asked not in (AUTO, NONE, *known):
        raise InvalidParameter(param, asked, f"one of {', '.join((AUTO, NONE, *sorted(known)))}")


def _choose(asked: str, template: str, told: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    if asked != AUTO:
        return None if asked == NONE else asked
    for texts, name in told:
        if all(text in template for text in texts):
            return None if name == NONE else name
    return None
