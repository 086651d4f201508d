"""What models' own chat templates write of calls is what the format that ``auto`` picks reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.text.test_parsers import Said

from tandem.protocol.structured import ReasoningSpan
from tandem.text.chat_template import ChatOptions, ChatTemplates
from tandem.text.parsers.calls import ToolSchemas
from tandem.text.parsers.engine import StreamParser
from tandem.text.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.text.parsers.model import ModelParsers, reasoning_format, tool_format

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parent / "templates"
FORMATS = {
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "Qwen-QwQ-32B": ("hermes", "qwen3"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "qwen3"),
    "Qwen3-Coder": ("qwen3_xml", None),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "deepseek_r1"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "qwen3"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "qwen3"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_json", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("openai", "openai_gptoss"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
}
ONE_CALL = {"openai-gpt-oss-120b"}
"""Writes the first alone."""
NO_HISTORY = {"ibm-granite-granite-3.3-2B-Instruct"}
"""Tells the model how to call, and leaves calls out of a history."""
PARAMETERS = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "far": {"type": "boolean"},
    "options": {"type": "object"},
    "names": {"type": "array", "items": {"type": "string"}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {"type": "object", "properties": properties},
        },
    }
    for name, properties in (("get_weather", PARAMETERS), ("now", {}))
]
CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "get_weather",
        {
            "city": 'São "P" <x>',
            "days": 3,
            "far": True,
            "options": {"a": [1, None, False], "b": "it's"},
            "names": ["x", 'y"'],
        },
    ),
    ("now", {}),
]


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


def rendered(name: str, count: int) -> tuple[str, str]:
    """The prompt that asks for an answer, and what follows it where the answer was ``count``
    calls."""
    templates = ChatTemplates({"default": source(name)}, {"bos_token": "<s>", "eos_token": "</s>"})
    calls = [
        {
            # Kimi's ids are part of what it writes; Mistral's are nine characters.
            "id": f"functions.{called}:{index}" if "Kimi" in name else f"abcdefgh{index}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for index, (called, arguments) in enumerate(CALLS[:count])
    ]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    options = ChatOptions(tools=TOOLS, add_generation_prompt=False)
    prompt = templates.render(asked, options)
    whole = templates.render([*asked, answer], options)
    assert whole.startswith(prompt)
    return prompt, whole[len(prompt) :]


def read(pieces: list[str], name: str, prompt: str) -> Said:
    tools, reasoning = FORMATS[name]
    parser = StreamParser(
        tools=TOOL_FORMATS[tools],
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        schemas=ToolSchemas.of(TOOLS),
        prompt=prompt,
        new_id=lambda: "call_1",
    )
    said = Said()
    for piece in pieces:
        said.take(parser.feed(piece))
    return said.take(parser.end())


@pytest.mark.parametrize("name", FORMATS)
def test_a_template_tells_its_formats(name: str) -> None:
    assert tool_format("auto", source(name)) == FORMATS[name][0]
    assert reasoning_format("auto", source(name)) == FORMATS[name][1]
    assert {each.stem for each in FOLDER.glob("*.jinja")} == set(FORMATS)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - NO_HISTORY))
@pytest.mark.parametrize("count", [1, 2])
def test_what_a_template_writes_is_read(name: str, count: int) -> None:
    """Names and arguments with all their types, in one piece and cut at every place."""
    if name in ONE_CALL and count > 1:
        pytest.skip("the template writes one call alone")
    prompt, text = rendered(name, count)
    whole = read([text], name, prompt)
    assert whole.meant == CALLS[:count], text
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], name, prompt) == whole, text[:at]


def test_an_answer_to_a_tools_result_is_no_thought() -> None:
    """R1's template opens a thought before any other answer: all of this one came as reasoning."""
    name = "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
    templates = ChatTemplates({"default": source(name)}, {"bos_token": "<s>", "eos_token": "</s>"})
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    parsers = ModelParsers(reasoning=REASONING_FORMATS["deepseek_r1"])
    asked, told = templates.render(chat[:1]), templates.render(chat)
    for prompt, thought, span in (
        (asked, "It is sunny.", ReasoningSpan(close="</think>")),
        (told, "", ReasoningSpan(opens=("<think>",), close="</think>")),
    ):
        stream = parsers.begin((), prompt)
        said = Said().take(stream.feed("It is sunny.")).take(stream.end())
        assert (said.reasoning, said.content) == (thought, "" if thought else "It is sunny.")
        assert parsers.span(prompt) == span
