"""The openai package for Python."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "openai")


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.BASE, api_key=served.KEY, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **params: Any) -> Any:
    common: Any = {"model": served.MODEL, "messages": served.CHAT, "temperature": 0}
    return client.chat.completions.create(**{**common, "max_tokens": 12, **params})


@covers("chat", "stream", "usage")
def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    """Deltas join to the whole text, and both count the same tokens."""
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    assert whole.choices[0].message.content
    assert whole.choices[0].message.content == "".join(
        chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
    )
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == served.prompt_tokens()
        assert 0 < usage.completion_tokens <= 12


@covers("tools")
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_calls(client: openai.OpenAI, stream: bool) -> None:
    """A named call, a required one, then words: each sees the results of those before."""
    messages = list(served.WEATHER)
    for choice in (served.NAMED, "required"):
        asked: Any = {"model": served.MODEL, "messages": messages, "max_tokens": 200}
        asked |= {"tools": [served.TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                said = events.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**asked).choices[0].message
        assert said.tool_calls is not None
        (call,) = said.tool_calls
        result = served.weather(**json.loads(call.function.arguments))
        messages.append(said.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = chat(client, messages=messages, tools=[served.TOOL], tool_choice="none")

    assert last.choices[0].message.content
    assert last.choices[0].message.tool_calls is None
    assert last.usage.prompt_tokens > served.prompt_tokens(served.WEATHER) + 50


@covers("structured output")
def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    """``parse`` gives an instance of the class."""
    answer = client.chat.completions.parse(
        model=served.MODEL, messages=served.CHAT, response_format=served.City, max_tokens=200
    )

    assert isinstance(answer.choices[0].message.parsed, served.City)


@covers("logprobs")
def test_logprobs(client: openai.OpenAI) -> None:
    """A greedy token is the best of its alternatives."""
    content = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content

    assert content
    assert all(each.logprob == each.top_logprobs[0].logprob <= 0 for each in content)


@covers("embeddings")
def test_embeddings(client: openai.OpenAI) -> None:
    """The package asks for base64; vectors are as long as the model is wide, and of length one."""
    answer = client.embeddings.create(model=served.MODEL, input=["Paris", "a cat", "Paris"])

    vectors = [item.embedding for item in answer.data]
    assert [len(each) for each in vectors] == [576] * 3
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-3)
    assert vectors[0] == pytest.approx(vectors[2], abs=1e-3)
    assert vectors[0] != pytest.approx(vectors[1], abs=1e-2)


@covers("responses")
def test_responses(client: openai.OpenAI) -> None:
    """Whole, and as a stream of events that goes on from it."""
    asked: Any = {"model": served.MODEL, "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(**asked, input=served.QUESTION)
    assert first.output_text == chat(client).choices[0].message.content
    with client.responses.stream(**asked, input="Sure?", previous_response_id=first.id) as stream:
        second = stream.get_final_response()

    assert second.output_text
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


@covers("errors")
def test_errors(client: openai.OpenAI) -> None:
    """Each has its own class and the server's words."""
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        chat(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="nobody"):
        chat(client, model="nobody")
    with pytest.raises(openai.AuthenticationError):
        chat(client.with_options(api_key="wrong"))


@covers("cancel")
def test_a_closed_stream_is_cancelled(client: openai.OpenAI) -> None:
    stream = chat(client, stream=True, max_tokens=served.LONG, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert served.running() > 0
    stream.close()

    assert served.becomes(False)


@covers("batch")
async def test_many_at_once() -> None:
    """Each gets the answer that it would get alone."""
    common: Any = {"model": served.MODEL, "temperature": 0, "max_tokens": 8}
    async with openai.AsyncOpenAI(base_url=served.BASE, api_key=served.KEY) as client:

        async def ask(number: int) -> int:
            text = " ".join(["word"] * number)
            chat: Any = [{"role": "user", "content": text}]
            answer: Any = await client.chat.completions.create(messages=chat, **common)
            return int(answer.usage.prompt_tokens)

        counts = await asyncio.gather(*(ask(number) for number in range(1, served.MANY + 1)))

    assert counts == list(range(counts[0], counts[0] + served.MANY))
