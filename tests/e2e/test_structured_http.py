"""Structured output by the openai package against prefill and decode workers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from client import held_after
from pydantic import BaseModel, ConfigDict, Field
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT: Any = [{"role": "user", "content": "Which city is the capital of France? One word."}]
FREE_SECONDS = 10.0
"""What is held longer is held for good."""


@pytest.fixture
def client(small_pair: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, wanted: dict[str, Any], **params: Any) -> Any:
    body = {"structured_outputs": wanted, **params.pop("extra_body", {})}
    settings: Any = {"model": "smol", "messages": CHAT, "max_tokens": 40, "extra_body": body}
    return client.chat.completions.create(**{**settings, **params})


def test_answers_match_streamed_and_not(client: openai.OpenAI, small_pair: Stack) -> None:
    """One seed, one answer, whose last chunk says that it stopped; others run beside it."""
    regex = r"(Paris|Lyon), [0-9]{5}!"

    def both(seed: int) -> tuple[str, str]:
        whole = chat(client, {"regex": regex}, seed=seed).choices[0]
        chunks = list(chat(client, {"regex": regex}, seed=seed, stream=True))
        assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"
        return whole.message.content, "".join(c.choices[0].delta.content or "" for c in chunks)

    def free(_: int) -> str:
        settings: Any = {"model": "smol", "messages": CHAT, "temperature": 0, "max_tokens": 16}
        answer = client.chat.completions.create(**settings)
        return answer.choices[0].message.content or ""

    alone = free(0)
    with ThreadPoolExecutor(6) as threads:
        beside = list(threads.map(free, range(3)))
        for whole, streamed in threads.map(both, range(3)):
            assert whole == streamed
            assert re.fullmatch(regex, whole)

    assert set(beside) == {alone}
    assert held_after(small_pair, FREE_SECONDS) == {}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def test_an_answer_is_parsed_into_a_class(client: openai.OpenAI, small_pair: Stack) -> None:
    """``parse`` of the openai package, its strict schema, whole and streamed, and any object."""
    settings: Any = {"model": "smol", "messages": CHAT, "max_tokens": 80, "temperature": 1.0}
    compact: Any = {"extra_body": {"repetition_penalty": 1.1}}
    asked: Any = {**settings, **compact, "seed": 1, "response_format": Person}
    choice = client.chat.completions.parse(**asked).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Person)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed
    any_object = client.chat.completions.create(
        **{**settings, "max_tokens": 12}, seed=1, response_format={"type": "json_object"}
    )
    assert (any_object.choices[0].message.content or "").lstrip().startswith("{")
    assert held_after(small_pair, FREE_SECONDS) == {}


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Lyon"]}, "days": {"$ref": "#/$defs/few"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"few": {"type": "integer", "minimum": 1, "maximum": 3}},
        },
    },
}


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("stream", "choice"),
    [
        pytest.param(False, NAMED, id="whole, named"),
        pytest.param(True, "required", id="streamed, any"),
        pytest.param(False, "required", id="whole, any", marks=pytest.mark.nightly),
        pytest.param(True, NAMED, id="streamed, named", marks=pytest.mark.nightly),
    ],
)
def test_a_loop_of_tool_calls_runs_to_its_end(
    client: openai.OpenAI, small_pair: Stack, stream: bool, choice: Any
) -> None:
    """A model that was taught no calls is made to call, hears the result, and answers in words."""
    settings: Any = {"model": "smol", "tools": [WEATHER], "temperature": 1.0, "seed": 5}
    asked: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
    forced: Any = {**settings, "messages": asked, "tool_choice": choice, "max_tokens": 200}
    if stream:
        with client.chat.completions.stream(**forced) as chunks:
            said = chunks.get_final_completion().choices[0]
    else:
        said = client.chat.completions.create(**forced, parallel_tool_calls=False).choices[0]
    assert said.finish_reason == ("tool_calls" if choice == "required" else "stop")
    assert not said.message.content
    calls = said.message.tool_calls or []
    assert calls
    for call in calls:
        assert call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Paris", "Lyon")
        assert 1 <= arguments["days"] <= 3
    history: Any = [
        *asked,
        {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]},
        *({"role": "tool", "tool_call_id": call.id, "content": "Sunny."} for call in calls),
    ]
    last = client.chat.completions.create(model="smol", messages=history, max_tokens=12)
    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None
    assert held_after(small_pair, FREE_SECONDS) == {}


def test_choices_of_a_completion(client: openai.OpenAI) -> None:
    """n=3 of one prompt, each one of the texts."""
    answer = client.completions.create(
        model="smol",
        prompt="The capital of France is",
        n=3,
        temperature=1.0,
        seed=4,
        extra_body={"structured_outputs": {"choice": [" Paris.", " London.", " Rome."]}},
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.text in (" Paris.", " London.", " Rome.")
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_compile_is_a_bad_request(
    client: openai.OpenAI, small_pair: Stack, stream: bool
) -> None:
    """Before a stream has begun, with the field and the worker's words; nothing is left behind."""
    with pytest.raises(openai.BadRequestError, match="unclosed group") as bad:
        chat(client, {"regex": "(a"}, stream=stream)
    assert bad.value.param == "structured_outputs.regex"
    with pytest.raises(openai.BadRequestError, match="not at /properties/a,") as bad:
        chat(client, {"json": {"properties": {"a": {"not": {}}}}}, stream=stream)
    assert bad.value.param == "structured_outputs.json"
    assert held_after(small_pair, FREE_SECONDS) == {}


def test_free_text_with_a_part_that_has_a_form(client: openai.OpenAI, small_pair: Stack) -> None:
    """A structural tag over prefill and decode worker, by vLLM's and by OpenAI's spelling."""
    city = {"type": "json_schema", "json_schema": WEATHER["function"]["parameters"]}
    tag = {"begin": "<city>", "content": city, "end": "</city>"}
    form: dict[str, Any] = {"type": "triggered_tags", "triggers": ["<city>"], "tags": [tag]}
    form |= {"at_least_one": True, "stop_after_first": True}
    wanted = {"type": "structural_tag", "format": form}
    said = [
        chat(client, {"structural_tag": wanted}, seed=3, max_tokens=200),
        chat(client, {"structural_tag": json.dumps(wanted)}, seed=3, max_tokens=200),
        client.chat.completions.create(
            model="smol",
            messages=CHAT,
            max_tokens=200,
            seed=3,
            extra_body={"response_format": wanted},
        ),
    ]
    texts = {each.choices[0].message.content for each in said}
    assert len(texts) == 1
    found = re.fullmatch(r"<city>(.*)</city>", texts.pop(), re.DOTALL)
    assert found is not None
    assert json.loads(found[1])["city"] in ("Paris", "Lyon")
    assert held_after(small_pair, FREE_SECONDS) == {}
