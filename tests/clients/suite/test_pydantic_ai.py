"""pydantic-ai, whose agents run loops of calls themselves."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from pydantic_ai import Agent, Embedder, NativeOutput, RunContext, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import Tool, ToolDefinition
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "pydantic-ai-slim")
GREEDY: Any = {"temperature": 0, "max_tokens": 16}


def provider(key: str = served.KEY) -> OpenAIProvider:
    return OpenAIProvider(base_url=served.BASE, api_key=key)


def agent(**settings: Any) -> Agent[Any, Any]:
    model = settings.pop("model", None) or OpenAIChatModel(served.MODEL, provider=provider())
    return Agent(model, **{"model_settings": GREEDY, **settings})


@covers("chat", "stream", "usage")
async def test_chat_whole_and_streamed() -> None:
    """Both runs say and count the same."""
    whole = await agent().run(served.QUESTION)
    async with agent().run_stream(served.QUESTION) as stream:
        text = await stream.get_output()
        usage: Any = stream.usage
    counted: Any = whole.usage

    assert text == whole.output != ""
    assert usage.input_tokens == counted.input_tokens == served.prompt_tokens()
    assert usage.output_tokens == counted.output_tokens > 0


async def once(context: RunContext[Any], tool: ToolDefinition) -> ToolDefinition | None:
    return None if answered(context) else tool


async def then(context: RunContext[Any], tools: list[ToolDefinition]) -> list[ToolDefinition]:
    """The final call, once the tool has answered."""
    return tools if answered(context) else []


def answered(context: RunContext[Any]) -> bool:
    parts = [part for message in context.messages for part in message.parts]
    return any(isinstance(part, ToolReturnPart) for part in parts)


@covers("tools")
async def test_an_agent_runs_its_loop_to_the_end() -> None:
    """It must call; the tool first, then the output's, whose arguments are the result."""
    settings: Any = {**GREEDY, "max_tokens": 200, "parallel_tool_calls": False}
    runner = agent(
        tools=[Tool(served.weather, prepare=once)],
        output_type=ToolOutput(served.City),
        capabilities=[PrepareOutputTools(then)],
        model_settings=settings,
    )
    done = await runner.run("How is the weather in Paris?")

    parts = [part for message in done.all_messages() for part in message.parts]
    told = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert "sunny" in told[0].content
    assert isinstance(done.output, served.City)


@covers("structured output")
async def test_an_answer_is_of_the_class() -> None:
    """By a schema for the answer and by a call of the output's tool."""
    settings: Any = {**GREEDY, "max_tokens": 200}
    for kind in (NativeOutput(served.City), ToolOutput(served.City)):
        done = await agent(output_type=kind, model_settings=settings).run(served.QUESTION)
        assert isinstance(done.output, served.City)


@covers("logprobs")
async def test_logprobs() -> None:
    """They stand in the details of the model's answer."""
    settings: Any = {**GREEDY, "openai_logprobs": True, "openai_top_logprobs": 2}
    done = await agent(model_settings=settings).run(served.QUESTION)
    details: Any = done.all_messages()[-1].provider_details

    assert all(each["logprob"] <= 0 for each in details["logprobs"])
    assert len(details["logprobs"]) > 1


@covers("embeddings")
async def test_embeddings() -> None:
    embedder = Embedder(OpenAIEmbeddingModel(served.MODEL, provider=provider()))
    found = await embedder.embed_documents(["Paris", "a cat"])

    assert [len(each) for each in found.embeddings] == [576, 576]


@covers("responses")
async def test_responses() -> None:
    """The other endpoint says the same."""
    model = OpenAIResponsesModel(served.MODEL, provider=provider())
    other = await agent(model=model).run(served.QUESTION)

    assert other.output == (await agent().run(served.QUESTION)).output


@covers("errors")
async def test_errors() -> None:
    """One class with the status and the server's words."""
    cases: list[tuple[int, str, Any, Any]] = [
        (400, "temperature", OpenAIChatModel(served.MODEL, provider=provider()), -1),
        (404, "nobody", OpenAIChatModel("nobody", provider=provider()), 0),
        (401, "API key", OpenAIChatModel(served.MODEL, provider=provider("wrong")), 0),
    ]
    for status, words, model, temperature in cases:
        with pytest.raises(ModelHTTPError, match=words) as error:
            await agent(model=model, model_settings={"temperature": temperature}).run("Hi")
        assert error.value.status_code == status


@covers("cancel")
async def test_a_stream_that_is_left_is_cancelled() -> None:
    settings: Any = {"max_tokens": served.LONG, "extra_body": {"ignore_eos": True}}
    async with agent(model_settings=settings).run_stream(served.QUESTION) as stream:
        async for _ in stream.stream_text(delta=True):
            break
        assert await asyncio.to_thread(served.becomes, True)
        await stream.cancel()

    assert await asyncio.to_thread(served.becomes, False)


@covers("batch")
async def test_many_at_once() -> None:
    """Each run hears the answer to its own prompt."""
    texts = [" ".join(["word"] * number) for number in range(1, served.MANY + 1)]
    runs = await asyncio.gather(*(agent().run(text) for text in texts))

    usages: list[Any] = [run.usage for run in runs]
    counts = [usage.input_tokens for usage in usages]
    assert counts == list(range(counts[0], counts[0] + served.MANY))
