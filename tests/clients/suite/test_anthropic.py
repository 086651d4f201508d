"""The anthropic package for Python."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import anthropic
import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "anthropic")
TOOL: Any = {"name": "weather", "description": "Weather.", "input_schema": served.SCHEMA}


@pytest.fixture
def client() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.URL, api_key=served.KEY, max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, **params: Any) -> Any:
    common: Any = {"model": served.MODEL, "messages": served.CHAT, "max_tokens": 12}
    extra: Any = {"temperature": 0, **params.pop("extra_body", {})}
    return client.messages.create(**{**common, **params}, extra_body=extra)


@covers("chat", "stream", "usage", "messages")
def test_messages_whole_and_streamed(client: anthropic.Anthropic) -> None:
    """Both say and count the same, and count_tokens knew it before."""
    whole = ask(client)
    common: Any = {"model": served.MODEL, "messages": served.CHAT, "max_tokens": 12}
    with client.messages.stream(**common, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text != ""
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model=served.MODEL, messages=served.CHAT)

    for usage in (whole.usage, streamed.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
        assert 0 < usage.output_tokens <= 12
    assert counted.input_tokens == served.prompt_tokens()


@covers("tools")
def test_a_loop_of_calls(client: anthropic.Anthropic) -> None:
    """A named call, any call, then words."""
    messages = list(served.WEATHER)
    for choice in ({"type": "tool", "name": "weather"}, {"type": "any"}):
        once = {**choice, "disable_parallel_tool_use": True}
        said = ask(client, messages=messages, tools=[TOOL], tool_choice=once, max_tokens=200)
        assert said.stop_reason == "tool_use"
        (call,) = (block for block in said.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id}
        result |= {"content": served.weather(**call.input)}
        messages.append({"role": "assistant", "content": said.content})
        messages.append({"role": "user", "content": [result]})
    last = ask(client, messages=messages, tools=[TOOL], tool_choice={"type": "none"})

    assert [block.type for block in last.content] == ["text"]


@covers("structured output")
def test_an_answer_is_parsed(client: anthropic.Anthropic) -> None:
    """``parse`` gives an instance of the class."""
    answer = client.messages.parse(
        model=served.MODEL, messages=served.CHAT, max_tokens=200, output_format=served.City
    )

    assert isinstance(answer.parsed_output, served.City)


@covers("errors")
def test_errors(client: anthropic.Anthropic) -> None:
    """Each has its own class and the server's words."""
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        ask(client, extra_body={"temperature": -1})
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        ask(client, model="nobody")
    with pytest.raises(anthropic.AuthenticationError):
        ask(client.with_options(api_key="wrong"))


@covers("cancel")
def test_a_closed_stream_is_cancelled(client: anthropic.Anthropic) -> None:
    chat: Any = [{"role": "user", "content": "Write a very long story."}]
    stream = ask(client, messages=chat, max_tokens=served.LONG, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    assert served.running() > 0
    stream.close()

    assert served.becomes(False)


@covers("batch")
async def test_many_at_once() -> None:
    """Each gets an answer to its own prompt."""
    async with anthropic.AsyncAnthropic(base_url=served.URL, api_key=served.KEY) as client:

        async def ask(number: int) -> int:
            chat: Any = [{"role": "user", "content": " ".join(["word"] * number)}]
            said = await client.messages.create(model=served.MODEL, messages=chat, max_tokens=8)
            return int(said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0))

        counts = await asyncio.gather(*(ask(number) for number in range(1, served.MANY + 1)))

    assert counts == list(range(counts[0], counts[0] + served.MANY))
