"""Which formats are chosen: by the template's own words, or by name."""

import pytest

from tandem.protocol.errors import InvalidParameter
from tandem.text.parsers.choose import check_name, reasoning_format, tool_format
from tandem.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\n{'name'...}\n</tool_call> </think>", "hermes", "qwen3"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3_xml", None),
        ("<tool_call>{{ name }}<arg_key> </think>", "glm45", "glm45"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai_gptoss"),
        ("<minimax:tool_call><invoke name= </think>", "minimax_m2", "minimax_m2"),
        ("[TOOL_CALLS]f[ARGS] [THINK]", "mistral", "mistral"),
        ("[TOOL_CALLS] [", "mistral_json", None),
        ("<｜Assistant｜><think>\n<｜tool▁calls▁begin｜>```json", "deepseek_v3", "deepseek_r1"),
        ("<|python_tag|>", "llama3_json", None),
        ("<|tool_call>call: <channel|>", "gemma4", "gemma4"),
        ("{{ messages }}", None, None),
    ],
)
def test_templates_tell(template: str, tools: str | None, reasoning: str | None) -> None:
    """auto goes by what the template spells out; none and names go before it."""
    assert tool_format("auto", template) == tools
    assert reasoning_format("auto", template) == reasoning
    assert tool_format("none", template) is None
    assert tool_format("hermes", template) == "hermes"


def test_unknown_names_are_refused_with_the_list() -> None:
    """The error says what there is."""
    check_name("tool_call_parser", "auto", TOOL_FORMATS)
    check_name("reasoning_parser", "qwen3", REASONING_FORMATS)
    with pytest.raises(InvalidParameter, match=r"hermes.*qwen3_xml"):
        check_name("tool_call_parser", "hermess", TOOL_FORMATS)
