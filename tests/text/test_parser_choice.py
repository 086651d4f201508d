"""Which formats are chosen: by the template's own words, or by name."""

import pytest
import tokenizers
from tests.text.conftest import SPECIALS, byte_level_backend, word_piece_backend

from tandem.protocol.errors import InvalidParameter
from tandem.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.model import ModelParsers, check_name, reasoning_format, tool_format
from tandem.text.tokenizer import Tokenizer


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
        ('<|python_tag|> <function=f>{"a": 1}</function>', None, None),
        ("<|tool_call>call: <channel|>", "gemma4", "gemma4"),
        ("{{ messages }}", "hermes", None),
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


@pytest.mark.parametrize("backend", [byte_level_backend(), word_piece_backend()])
def test_marks_are_seen_and_other_special_tokens_are_not(backend: tokenizers.Tokenizer) -> None:
    """Of the special tokens only those that a format is told by stand in its text."""
    backend.add_special_tokens(["<tool_call>", "</think>"])
    tokenizer = Tokenizer(backend)
    parsers = ModelParsers.of(tokenizer, tools="hermes", reasoning="qwen3")
    names = ("<tool_call>", SPECIALS[1], "</think>")
    ids = [int(backend.token_to_id(each) or 0) for each in names]
    seeing = tokenizer.detokenizer(seen=parsers.seen)
    text = "".join(map(seeing.feed, ids)) + seeing.end()

    assert parsers.seen == {ids[0], ids[2]}
    assert text.replace(" ", "") == "<tool_call></think>"


@pytest.mark.parametrize(("tools", "reasoning"), [("openai", "qwen3"), ("hermes", "openai_gptoss")])
def test_formats_that_cannot_stand_in_one_text_are_refused(
    byte_level: Tokenizer, tools: str, reasoning: str
) -> None:
    """Channels leave no room for marks of other formats."""
    with pytest.raises(InvalidParameter, match="reasoning_parser"):
        ModelParsers.of(byte_level, tools=tools, reasoning=reasoning)
