"""Responses and messages by their own packages against prefill and decode workers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import openai
import pytest
from client import held_after
from pydantic import BaseModel, ConfigDict, Field
from stack import Stack

if TYPE_CHECKING:
    import anthropic  # takes seconds to import

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

QUESTION = "Which city is the capital of France? One word."
WEATHER = "How is the weather in Paris?"
FREE_SECONDS = 10.0
"""What is held longer is held for good."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}},
}


@pytest.fixture
def ours(small_pair: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def theirs(small_pair: Stack) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=small_pair.url, api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, messages: Any) -> str:
    answer = client.chat.completions.create(
        model="smol", messages=messages, temperature=0, max_tokens=12
    )
    return answer.choices[0].message.content or ""


def test_all_three_answer_one_chat_alike(
    ours: openai.OpenAI, theirs: anthropic.Anthropic, small_pair: Stack
) -> None:
    """Whole and streamed, over two turns, of which responses keep the first."""
    asked: Any = [{"role": "user", "content": QUESTION}]
    first = chat(ours, asked)
    again: Any = [*asked, {"role": "assistant", "content": first}, {"role": "user", "content": "?"}]
    second = chat(ours, again)
    settings: Any = {"model": "smol", "max_output_tokens": 12, "temperature": 0}
    response = ours.responses.create(**settings, input=QUESTION)
    more: Any = {**settings, "input": "?", "previous_response_id": response.id}
    *_, last = ours.responses.create(**more, stream=True)
    assert (response.output_text, last.response.output_text) == (first, second)
    limits: Any = {"model": "smol", "max_tokens": 12, "extra_body": {"temperature": 0}}
    message = theirs.messages.create(**limits, messages=asked)
    with theirs.messages.stream(**limits, messages=again) as events:
        assert (message.content[0].text, events.get_final_text()) == (first, second)
    count = theirs.messages.count_tokens(model="smol", messages=asked).input_tokens
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    assert count == usage.input_tokens + cached
    assert response.usage is not None
    assert count == response.usage.input_tokens
    assert held_after(small_pair, FREE_SECONDS) == {}


def check_call(name: str, arguments: Any) -> None:
    """A call is one that the tool's schema allows."""
    assert name == "weather"
    assert arguments["city"] in ("Paris", "Lyon")
    assert 1 <= arguments["days"] <= 3


LOOPS = [
    pytest.param(False, True, id="whole, named", marks=pytest.mark.nightly),
    pytest.param(True, False, id="streamed, any"),
    pytest.param(False, False, id="whole, any", marks=pytest.mark.nightly),
    pytest.param(True, True, id="streamed, named", marks=pytest.mark.nightly),
]
"""Whether calls are streamed, and whether the tool to call is named."""


@pytest.mark.parametrize(("stream", "is_named"), LOOPS)
def test_a_loop_of_calls_by_responses(
    ours: openai.OpenAI, small_pair: Stack, stream: bool, is_named: bool
) -> None:
    """A model that was taught no calls is made to call, hears the result, and answers in words."""
    tool: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    choice: Any = {"type": "function", "name": "weather"} if is_named else "required"
    settings: Any = {"model": "smol", "temperature": 1.0, "extra_body": {"seed": 5}}
    forced: Any = {**settings, "input": WEATHER, "tools": [tool], "tool_choice": choice}
    if stream:
        with ours.responses.stream(**forced, max_output_tokens=300) as events:
            said: Any = events.get_final_response()
    else:
        said = ours.responses.create(**forced, max_output_tokens=300)
    assert said.status == "completed"
    calls = [item for item in said.output if item.type == "function_call"]
    assert calls
    for call in calls:
        check_call(call.name, json.loads(call.arguments))
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        for call in calls
    ]
    last = ours.responses.create(
        model="smol", input=results, previous_response_id=said.id, max_output_tokens=12
    )
    assert last.output_text
    assert held_after(small_pair, FREE_SECONDS) == {}


@pytest.mark.parametrize(("stream", "is_named"), LOOPS)
def test_a_loop_of_calls_by_messages(
    theirs: anthropic.Anthropic, small_pair: Stack, stream: bool, is_named: bool
) -> None:
    tool: Any = {"name": "weather", "description": "Forecast.", "input_schema": SCHEMA}
    asked: Any = [{"role": "user", "content": WEATHER}]
    choice = {"type": "tool", "name": "weather"} if is_named else {"type": "any"}
    forced: Any = {
        "model": "smol",
        "messages": asked,
        "tools": [tool],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": 300,
    }
    if stream:
        with theirs.messages.stream(**forced) as events:
            said: Any = events.get_final_message()
    else:
        said = theirs.messages.create(**forced)
    assert said.stop_reason == "tool_use"
    calls = [block for block in said.content if block.type == "tool_use"]
    assert len(calls) == 1
    check_call(calls[0].name, calls[0].input)
    result: Any = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "Sunny."}
    history: Any = [
        *asked,
        {"role": "assistant", "content": said.content},
        {"role": "user", "content": [result]},
    ]
    last = theirs.messages.create(model="smol", messages=history, max_tokens=12)
    assert last.content[0].type == "text"
    assert held_after(small_pair, FREE_SECONDS) == {}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


class City(BaseModel):
    """What the model is to say of a city; the anthropic package takes bounds out of schemas."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Lyon"]
    is_capital: bool


def test_answers_are_parsed_into_a_class(
    ours: openai.OpenAI, theirs: anthropic.Anthropic, small_pair: Stack
) -> None:
    """``parse`` of either package, under a grammar that workers follow."""
    whole = ours.responses.parse(
        model="smol",
        input=QUESTION,
        max_output_tokens=120,
        text_format=Person,
        extra_body={"repetition_penalty": 1.1, "seed": 1},
    )
    assert isinstance(whole.output_parsed, Person)
    answer = theirs.messages.parse(
        model="smol",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=200,
        output_format=City,
    )
    assert isinstance(answer.parsed_output, City)
    assert held_after(small_pair, FREE_SECONDS) == {}
