"""All known formats, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from tandem.text.parsers.bodies import JsonCall, NamedJson, TaggedParameters
from tandem.text.parsers.literals import BareKeys, PythonCall
from tandem.text.parsers.tables import (
    CallText,
    ChannelFormat,
    LiteralText,
    ParameterText,
    ReasoningFormat,
    StartText,
    ToolFormat,
)


def not_one_of(words: Iterable[str]) -> str:
    """Return an expression for texts before a quote that are none of ``words``.

    No word may begin another. The expression ends at the first character that differs, or at the
    quote.
    """
    groups = [(first, list(rest)) for first, rest in groupby(sorted(words), lambda word: word[:1])]
    if groups == [("", [""])]:
        return r'[^"\\]'
    firsts = "".join(first for first, _ in groups)
    ways = [f"{first}{not_one_of(word[1:] for word in rest)}" for first, rest in groups]
    return "|".join([f'("|[^{firsts}"\\\\]', *ways]) + ")"


HARMONY = ChannelFormat()

_HERMES = ToolFormat(
    opens=("<tool_call>",),
    body=JsonCall(),
    closes=("</tool_call>",),
    texts=(
        CallText(
            trigger="<tool_call>",
            begin='<tool_call>\n{"name": "{name}", "arguments": ',
            end="}\n</tool_call>",
        ),
    ),
)
_FUNCTION = TaggedParameters(
    name_end=(">",),
    open="<parameter=",
    key_end=">",
    value_open="",
    value_end="</parameter>",
    end="</function>",
)
_QWEN_PARAMETER = ParameterText(
    begin="<parameter={key}>\n", key_end=">", pad="\n", end="</parameter>", after="\n"
)
_QWEN = ToolFormat(
    opens=("<tool_call>", "<function="),
    call_opens=("<function=",),
    body=_FUNCTION,
    closes=("</tool_call>",),
    texts=(
        CallText(
            trigger="<tool_call>",
            begin="<tool_call>\n<function={name}>\n",
            parameters=_QWEN_PARAMETER,
            end="</function>\n</tool_call>",
        ),
        CallText(
            trigger="<function=",
            begin="<function={name}>\n",
            parameters=_QWEN_PARAMETER,
            end="</function>",
        ),
    ),
)
_SEED = ToolFormat(
    opens=("<seed:tool_call>",),
    call_opens=("<function=",),
    body=_FUNCTION,
    closes=("</seed:tool_call>",),
    texts=(
        CallText(
            trigger="<seed:tool_call>",
            begin="<seed:tool_call>\n<function={name}>\n",
            parameters=ParameterText(
                begin="<parameter={key}>", key_end=">", end="</parameter>", after="\n"
            ),
            end="</function>\n</seed:tool_call>",
        ),
    ),
)
_GRANITE = ToolFormat(
    opens=("<|tool_call|>",),
    body=JsonCall(),
    listed=True,
    needs_list=True,
    texts=(
        CallText(
            trigger="<|tool_call|>",
            begin='<|tool_call|>[{"name": "{name}", "arguments": ',
            end="}]",
        ),
    ),
)
_NO_CALL_KEY = not_one_of(("name", "parameters", "arguments", "type"))
_LLAMA = ToolFormat(
    opens=("<|python_tag|>",),
    at_start=("{",),
    body=JsonCall(needs_arguments=True, known_only=True),
    separators=(";", ","),
    texts=(
        CallText(
            trigger="",
            begin="{",
            head=('"name"', ": ", '"{name}"', ", ", '"parameters"', ": "),
            end="}",
        ),
    ),
    start=StartText(
        separator="; ",
        marks=(("<|python_tag|>", ""),),
        words=(
            ("", r"[^{<\s]|<[^|]"),
            ("{", rf'[ \t\r\n]{{0,8}}([^"\s]|"{_NO_CALL_KEY})'),
        ),
    ),
)
_PYTHON = LiteralText(
    key="{key}=",
    inner_key='"{key}": ',
    separator=", ",
    words=("True", "False", "None"),
)
_PYTHONIC = ToolFormat(
    opens=("<|python_start|>", "<function_calls>"),
    at_start=("[",),
    body=PythonCall(),
    listed=True,
    needs_list=True,
    closes=("<|python_end|>", "</function_calls>"),
    texts=(CallText(trigger="", begin="{name}(", literals=_PYTHON, end=")"),),
    start=StartText(
        open="[",
        separator=", ",
        close="]",
        marks=(("<|python_start|>", "<|python_end|>"), ("<function_calls>", "</function_calls>")),
        words=(
            ("", r"[^\[<\s]|<[^|f]"),
            ("[", r"[ \t\r\n]{0,8}(\w*[^\w(\s.:-]|\w+\s+[^(\s])"),
        ),
    ),
)
_MISTRAL_JSON = ToolFormat(
    opens=("[TOOL_CALLS]",),
    body=JsonCall(),
    listed=True,
    needs_list=True,
    texts=(
        CallText(
            trigger="[TOOL_CALLS]",
            begin='[TOOL_CALLS][{"name": "{name}", "arguments": ',
            end="}]",
        ),
    ),
)
_MISTRAL = ToolFormat(
    opens=("[TOOL_CALLS]",),
    body=NamedJson(separators=("[ARGS]",), id_mark="[CALL_ID]", bare=True),
    texts=(CallText(trigger="[TOOL_CALLS]", begin="[TOOL_CALLS]{name}[ARGS]", end=""),),
)
_DEEPSEEK_V3 = ToolFormat(
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    call_opens=("<｜tool▁call▁begin｜>",),
    call_close="<｜tool▁call▁end｜>",
    body=NamedJson(before="function<｜tool▁sep｜>", separators=("\n```json\n",), after="```"),
    closes=("<｜tool▁calls▁end｜>",),
    texts=(
        CallText(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            end="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        CallText(
            trigger="<｜tool▁call▁begin｜>",
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            end="\n```<｜tool▁call▁end｜>",
        ),
    ),
)
_DEEPSEEK_V31 = ToolFormat(
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    call_opens=("<｜tool▁call▁begin｜>",),
    call_close="<｜tool▁call▁end｜>",
    body=NamedJson(separators=("<｜tool▁sep｜>",)),
    closes=("<｜tool▁calls▁end｜>",),
    texts=(
        CallText(
            trigger="<｜tool▁calls▁begin｜>",
            begin="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        CallText(
            trigger="<｜tool▁call▁begin｜>",
            begin="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            end="<｜tool▁call▁end｜>",
        ),
    ),
)
_KIMI = ToolFormat(
    opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    call_opens=("<|tool_call_begin|>",),
    call_close="<|tool_call_end|>",
    body=NamedJson(
        separators=("<|tool_call_argument_begin|>",), name_prefix="functions.", says_id=True
    ),
    closes=("<|tool_calls_section_end|>",),
    texts=(
        CallText(
            trigger="<|tool_calls_section_begin|>",
            begin="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:",
            after_number="<|tool_call_argument_begin|>",
            end="<|tool_call_end|><|tool_calls_section_end|>",
        ),
        CallText(
            trigger="<|tool_call_begin|>",
            begin="<|tool_call_begin|>functions.{name}:",
            after_number="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
        ),
    ),
)
_GLM = ToolFormat(
    opens=("<tool_call>",),
    body=TaggedParameters(
        name_end=(),
        open="<arg_key>",
        key_end="</arg_key>",
        value_open="<arg_value>",
        value_end="</arg_value>",
        end="</tool_call>",
        pad="",
    ),
    texts=(
        CallText(
            trigger="<tool_call>",
            begin="<tool_call>{name}\n",
            parameters=ParameterText(
                begin="<arg_key>{key}</arg_key>\n<arg_value>",
                key_end="</arg_key>",
                end="</arg_value>",
                after="\n",
            ),
            end="</tool_call>",
        ),
    ),
)
_MINIMAX = ToolFormat(
    opens=("<minimax:tool_call>",),
    call_opens=('<invoke name="',),
    body=TaggedParameters(
        name_end=('">',),
        open='<parameter name="',
        key_end='">',
        value_open="",
        value_end="</parameter>",
        end="</invoke>",
        pad="",
    ),
    closes=("</minimax:tool_call>",),
    texts=(
        CallText(
            trigger="<minimax:tool_call>",
            begin='<minimax:tool_call>\n<invoke name="{name}">\n',
            parameters=ParameterText(
                begin='<parameter name="{key}">',
                key_end='">',
                end="</parameter>",
                after="\n",
            ),
            end="</invoke>\n</minimax:tool_call>",
        ),
    ),
)


def _gemma(opened: str, quote: str, closed: str) -> ToolFormat:
    """Return the format of one Gemma model: calls with bare keys."""
    literals = LiteralText(
        key="{key}:",
        inner_key="{key}:",
        separator=",",
        quote=quote,
        words=("true", "false", "null"),
    )
    text = CallText(
        trigger=opened, begin=f"{opened}call:{{name}}{{", literals=literals, end=f"}}{closed}"
    )
    return ToolFormat(opens=(opened,), body=BareKeys(quote), closes=(closed,), texts=(text,))


_GEMMA4 = _gemma("<|tool_call>", '<|"|>', "<tool_call|>")
_FUNCTION_GEMMA = _gemma("<start_function_call>", "<escape>", "<end_function_call>")
_NEMOTRON = ToolFormat(
    opens=("<TOOLCALL>",),
    body=JsonCall(),
    listed=True,
    closes=("</TOOLCALL>",),
    texts=(
        CallText(
            trigger="<TOOLCALL>",
            begin='<TOOLCALL>[{"name": "{name}", "arguments": ',
            end="}]</TOOLCALL>",
        ),
    ),
)

FORCED = ToolFormat(opens=(), at_start=("[",), body=JsonCall(), listed=True, needs_list=True)
"""Format of an answer that a grammar restricts to a list of calls."""

TOOL_FORMATS: dict[str, ToolFormat | ChannelFormat] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "functiongemma": _FUNCTION_GEMMA,
    "gemma4": _GEMMA4,
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": _GRANITE,
    "hermes": _HERMES,
    "kimi_k2": _KIMI,
    "llama3_json": _LLAMA,
    "llama4_pythonic": _PYTHONIC,
    "minimax_m2": _MINIMAX,
    "mistral": _MISTRAL,
    "mistral_json": _MISTRAL_JSON,
    "nemotron_json": _NEMOTRON,
    "nemotron_v3": _QWEN,
    "openai": HARMONY,
    "pythonic": _PYTHONIC,
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
    "seed_oss": _SEED,
}
"""Tables by value of ``--tool-call-parser``."""

_THINK = ReasoningFormat(opens=("<think>",), close="</think>")
_THINKS_FIRST = ReasoningFormat(opens=("<think>",), close="</think>", starts_open=True)
_DEEPSEEK_THINKS_FIRST = ReasoningFormat(
    opens=("<think>",),
    close="</think>",
    starts_open=True,
    answered=("<｜tool▁outputs▁end｜>",),
)

REASONING_FORMATS: dict[str, ReasoningFormat | ChannelFormat] = {
    "deepseek_r1": _DEEPSEEK_THINKS_FIRST,
    "gemma4": ReasoningFormat(opens=("<|channel>thought\n",), close="<channel|>"),
    "glm45": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINKS_FIRST,
    "mistral": ReasoningFormat(opens=("[THINK]",), close="[/THINK]"),
    "nemotron_v3": _THINK,
    "openai_gptoss": HARMONY,
    "qwen3": _THINK,
    "seed_oss": ReasoningFormat(opens=("<seed:think>",), close="</seed:think>"),
}
"""Tables by value of ``--reasoning-parser``."""
