"""litellm, which speaks for many servers."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import litellm
import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "litellm")
PLACE: Any = {"api_base": served.BASE, "api_key": served.KEY, "num_retries": 0}


def chat(**params: Any) -> Any:
    common: Any = {"model": f"openai/{served.MODEL}", "messages": served.CHAT, "temperature": 0}
    return litellm.completion(**{**PLACE, **common, "max_tokens": 12, **params})


@covers("chat", "stream", "usage")
def test_chat_whole_and_streamed() -> None:
    """Deltas join to the whole text; both count what the server counts."""
    whole = chat()
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    usage = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    assert usage.prompt_tokens == whole.usage.prompt_tokens == served.prompt_tokens()
    assert usage.completion_tokens == whole.usage.completion_tokens


@covers("tools")
def test_a_loop_of_calls() -> None:
    """A named call, a required one, then words."""
    messages = list(served.WEATHER)
    for choice in (served.NAMED, "required"):
        asked: Any = {"messages": messages, "tools": [served.TOOL], "tool_choice": choice}
        said = chat(**asked, parallel_tool_calls=False, max_tokens=200).choices[0].message
        (call,) = said.tool_calls
        result = served.weather(**json.loads(call.function.arguments))
        messages.append(said.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    last = chat(messages=messages, tools=[served.TOOL], tool_choice="none")

    assert last.choices[0].message.content


@covers("structured output")
def test_an_answer_is_of_the_class() -> None:
    """A pydantic class becomes a schema that the answer follows."""
    answer = chat(response_format=served.City, max_tokens=200)

    city = served.City.model_validate_json(answer.choices[0].message.content)
    assert city.name in ("Paris", "Lyon")


@covers("logprobs")
def test_logprobs() -> None:
    choice = chat(logprobs=True, top_logprobs=2).choices[0]

    assert all(len(each.top_logprobs) == 2 for each in choice.logprobs.content)
    assert all(each.logprob <= 0 for each in choice.logprobs.content)


@covers("embeddings")
def test_embeddings() -> None:
    asked: Any = {"model": f"openai/{served.MODEL}", "input": ["Paris", "a cat"]}
    answer = litellm.embedding(**PLACE, **asked, encoding_format="float")

    assert [len(item["embedding"]) for item in answer.data] == [576, 576]


@covers("responses")
def test_responses() -> None:
    """The endpoint itself is asked, whole and streamed."""
    asked: Any = {"model": f"openai/{served.MODEL}", "input": served.QUESTION}
    asked |= {"max_output_tokens": 12, "temperature": 0, **PLACE}
    whole: Any = litellm.responses(**asked)
    last: Any = list(litellm.responses(**asked, stream=True))[-1]

    assert whole.id
    assert whole.output[-1].content[0].text == chat().choices[0].message.content
    assert last.type == "response.completed" or last.type == "response.incomplete"


@covers("messages")
def test_messages() -> None:
    asked: Any = {"model": f"anthropic/{served.MODEL}", "api_base": served.URL}
    answer = chat(**asked)

    assert answer.choices[0].message.content == chat().choices[0].message.content
    assert answer.usage.prompt_tokens == served.prompt_tokens()


@covers("errors")
def test_errors() -> None:
    """Each has its own class and the server's words."""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        chat(temperature=-1)
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        chat(model="openai/nobody")
    with pytest.raises(litellm.AuthenticationError):
        chat(api_key="wrong")


@covers("cancel")
async def test_a_closed_stream_is_cancelled() -> None:
    """Workers hold nothing soon after the stream is closed."""
    common: Any = {"model": f"openai/{served.MODEL}", "messages": served.CHAT, **PLACE}
    stream: Any = await litellm.acompletion(
        **common, stream=True, max_tokens=served.LONG, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    assert await asyncio.to_thread(served.becomes, True)
    await stream.aclose()

    assert await asyncio.to_thread(served.becomes, False)


@covers("batch")
def test_many_at_once() -> None:
    """``batch_completion`` keeps the order of its chats."""
    chats = [
        [{"role": "user", "content": " ".join(["word"] * number)}]
        for number in range(1, served.MANY + 1)
    ]
    common: Any = {"model": f"openai/{served.MODEL}", "max_tokens": 8, **PLACE}
    answers = litellm.batch_completion(messages=chats, **common)

    counts = [answer.usage.prompt_tokens for answer in answers]
    assert counts == list(range(counts[0], counts[0] + served.MANY))
