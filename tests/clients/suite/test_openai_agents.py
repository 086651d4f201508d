"""OpenAI's Agents SDK: an agent runs its loop with tools that the SDK marks as strict."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import agents
import openai
import pytest
import pytest_asyncio

covers = partial(pytest.mark.covers, "openai-agents")
URL = os.environ["TANDEM_CLIENTS_SCRIPTED"]
SECRET = "secret-4711"
MODELS: dict[str, Any] = {
    "chat": agents.OpenAIChatCompletionsModel,
    "responses": agents.OpenAIResponsesModel,
}


@agents.function_tool
def read_file(path: str) -> str:
    assert path == "secret.txt"
    return f"It says {SECRET}."


@pytest_asyncio.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """The SDK's own client; nothing is traced."""
    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
        yield client


def agent_of(client: openai.AsyncOpenAI, api: str) -> Any:
    """An agent over one of the APIs."""
    assert read_file.strict_json_schema
    model = MODELS[api](model="scripted", openai_client=client)
    return agents.Agent(name="Reader", instructions="Read.", model=model, tools=[read_file])


@covers("chat", "tools", "responses")
@pytest.mark.asyncio
@pytest.mark.parametrize("api", MODELS)
async def test_an_agent_runs_its_loop_to_the_end(client: openai.AsyncOpenAI, api: str) -> None:
    """The tool is called once, and its result is heard."""
    done = await agents.Runner.run(agent_of(client, api), "Read secret.txt")

    assert done.final_output == f"The file says {SECRET}."
    assert [each.type for each in done.new_items if "tool" in each.type] == [
        *("tool_call_item", "tool_call_output_item"),
    ]


@covers("stream")
@pytest.mark.asyncio
@pytest.mark.parametrize("api", MODELS)
async def test_an_agent_streams(client: openai.AsyncOpenAI, api: str) -> None:
    running = agents.Runner.run_streamed(agent_of(client, api), "Read secret.txt")
    kinds = {each.type async for each in running.stream_events()}

    assert "raw_response_event" in kinds
    assert running.final_output == f"The file says {SECRET}."
