"""The unmodified openai package against the real line: what a client sees, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from client import held_after
from reference import rows
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

CHAT: Any = [{"role": "user", "content": "Tell me about the river Seine in two sentences."}]
FREE_SECONDS = 10.0
"""What is held longer is held for good."""


@pytest.fixture
def client(small_pair: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **params: Any) -> Any:
    """A greedy chat of 12 tokens, unless ``params`` say otherwise."""
    settings: Any = {"model": "smol", "messages": CHAT, "temperature": 0, "max_tokens": 12}
    settings["extra_body"] = {"ignore_eos": True}
    return client.chat.completions.create(**{**settings, **params})


def complete(client: openai.OpenAI, prompt: str | list[int], **params: Any) -> Any:
    """A greedy completion of 12 tokens, unless ``params`` say otherwise."""
    settings = {"model": "smol", "prompt": prompt, "temperature": 0, "max_tokens": 12}
    return client.completions.create(**{**settings, **params})


def test_chat_streamed_and_not(client: openai.OpenAI) -> None:
    """Chunks join to the whole answer; usage counts the same tokens."""
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))

    text = "".join(c.choices[0].delta.content or "" for c in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_streamed_and_not(client: openai.OpenAI) -> None:
    """A prompt of ids gives the reference's text, streamed and not."""
    row = rows("small")[20]
    whole = complete(client, row.prompt, extra_body={"return_token_ids": True})
    chunks = list(complete(client, row.prompt, stream=True))

    assert whole.choices[0].model_extra["token_ids"] == row.tokens[:12]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_two_choices(client: openai.OpenAI, stream: bool) -> None:
    """n=2 with a seed: two different texts, each the same again."""
    settings = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 12}

    def texts() -> list[str]:
        found = ["", ""]
        if stream:
            for chunk in chat(client, stream=True, **settings):
                for choice in chunk.choices:
                    found[choice.index] += choice.delta.content or ""
        else:
            for choice in chat(client, **settings).choices:
                found[choice.index] = choice.message.content
        return found

    first = texts()
    assert first[0] != first[1]
    assert all(first)
    assert texts() == first


@pytest.mark.full
def test_logprobs(client: openai.OpenAI) -> None:
    """Greedy tokens are the best of their top ones; streamed logprobs are the same."""
    whole = chat(client, logprobs=True, top_logprobs=3, max_tokens=8)
    content = whole.choices[0].logprobs.content
    chunks = list(chat(client, logprobs=True, top_logprobs=3, max_tokens=8, stream=True))
    streamed = [
        each
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for each in choice.logprobs.content
    ]

    assert len(content) == 8
    for each in content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)
        assert each.logprob <= 0
    assert b"".join(bytes(each.bytes) for each in content).decode() == (
        whole.choices[0].message.content
    )
    assert [each.token for each in streamed] == [each.token for each in content]
    assert [each.logprob for each in streamed] == pytest.approx(
        [each.logprob for each in content], abs=1e-3
    )


def test_completion_logprobs_with_echo(client: openai.OpenAI) -> None:
    """echo scores the prompt too; its first token has no value."""
    answer = complete(client, "The capital of France is", echo=True, logprobs=1, max_tokens=2)
    logprobs = answer.choices[0].logprobs

    assert answer.choices[0].text.startswith("The capital of France is")
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_token_borders(client: openai.OpenAI, stream: bool) -> None:
    """A stop string made of the end of one token and the start of the next ends the text."""
    tokens = [each.token for each in chat(client, logprobs=True).choices[0].logprobs.content]
    text = "".join(tokens)
    at = next(i for i in range(3, len(tokens)) if len(tokens[i - 1]) > 2 and len(tokens[i]) > 2)
    stop = tokens[at - 1][-2:] + tokens[at][:2]
    if stream:
        chunks = list(chat(client, stop=[stop], stream=True))
        found = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        choice = chat(client, stop=[stop]).choices[0]
        found, reason = choice.message.content, choice.finish_reason

    assert found == text[: text.index(stop)]
    assert reason == "stop"


@pytest.mark.full
def test_seeds(client: openai.OpenAI) -> None:
    """The same seed gives the same text, another seed another."""
    texts = [
        chat(client, temperature=1.0, seed=seed).choices[0].message.content for seed in (5, 5, 6)
    ]

    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_disconnect_in_mid_stream(small_pair: Stack, client: openai.OpenAI) -> None:
    """Closing a stream after three chunks frees everything on the workers."""
    stream = chat(client, stream=True, max_tokens=2000)
    for _ in zip(range(3), stream, strict=False):
        pass
    assert small_pair.total("decode-0", "vllm:num_requests_running") == 1
    stream.close()

    assert held_after(small_pair, FREE_SECONDS) == {}


def test_error_classes(client: openai.OpenAI) -> None:
    """Each wrong request raises the package's class, with the field and the value."""
    with pytest.raises(openai.NotFoundError, match="other-model"):
        chat(client, model="other-model")
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        chat(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        complete(client, [5] * 9000)
    with pytest.raises(openai.BadRequestError, match="prompt"):
        complete(client, "")


async def test_a_client_that_loses_patience(small_pair: Stack) -> None:
    """The package's own timeout cancels the request on the workers."""
    url = f"{small_pair.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(
                model="smol", prompt=rows()[40].prompt, max_tokens=2000, timeout=0.5
            )

    assert await asyncio.to_thread(held_after, small_pair, FREE_SECONDS) == {}
