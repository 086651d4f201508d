"""langchain-openai."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "langchain-openai")


def model(**settings: Any) -> ChatOpenAI:
    """A greedy chat model of 12 tokens that tries once."""
    common: Any = {"model": served.MODEL, "base_url": served.BASE, "api_key": served.KEY}
    common |= {"temperature": 0, "max_retries": 0, "max_tokens": 12}
    return ChatOpenAI(**{**common, **settings})


@covers("chat", "stream", "usage")
def test_chat_whole_and_streamed() -> None:
    """Chunks add up to the whole message, its usage too."""
    whole = model().invoke(served.QUESTION)
    first, *others = model(stream_usage=True).stream(served.QUESTION)
    streamed: Any = sum(others, start=first)

    assert whole.content == streamed.content != ""
    for message in (whole, streamed):
        assert message.usage_metadata is not None
        assert message.usage_metadata["input_tokens"] == served.prompt_tokens()
        assert 0 < message.usage_metadata["output_tokens"] <= 12


@covers("tools")
def test_a_loop_of_calls() -> None:
    """A call that is forced by name is run, and its result is heard."""
    call = tool(served.weather)
    # Strict: what langchain makes of a function allows more arguments, and greedily they never end.
    once: Any = {"parallel_tool_calls": False, "strict": True}
    messages: list[Any] = [HumanMessage("How is the weather in Paris?")]
    for choice in ("weather", "any"):
        asked = model(max_tokens=200).bind_tools([call], tool_choice=choice, **once)
        said = asked.invoke(messages)
        assert said.tool_calls
        results = [call.invoke(each) for each in said.tool_calls]
        assert all(isinstance(each, ToolMessage) for each in results)
        messages += [said, *results]
    last = model().bind_tools([call], tool_choice="none").invoke(messages)

    assert last.content
    assert not last.tool_calls


@covers("structured output")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_is_parsed(method: Any) -> None:
    asking = model(max_tokens=200).with_structured_output(served.City, method=method)

    assert isinstance(asking.invoke(served.QUESTION), served.City)


@covers("logprobs")
def test_logprobs() -> None:
    """They stand in the message's metadata."""
    said = model(logprobs=True, top_logprobs=2).invoke(served.QUESTION)
    content = said.response_metadata["logprobs"]["content"]

    assert "".join(each["token"] for each in content).startswith(said.text)
    assert all(each["logprob"] <= 0 and len(each["top_logprobs"]) == 2 for each in content)


@covers("embeddings")
def test_embeddings() -> None:
    """Texts as they are: the check of lengths would use OpenAI's own tokenizer."""
    embedder = OpenAIEmbeddings(
        model=served.MODEL,
        base_url=served.BASE,
        api_key=served.KEY,
        check_embedding_ctx_length=False,
    )
    vectors = embedder.embed_documents(["Paris", "a cat"])

    assert [len(each) for each in vectors] == [576, 576]
    assert embedder.embed_query("Paris") == pytest.approx(vectors[0], abs=1e-3)


@covers("responses")
def test_responses() -> None:
    """The same answer by the other endpoint, whole and streamed."""
    asking = model(use_responses_api=True, max_tokens=16)
    whole = asking.invoke(served.QUESTION)
    streamed = "".join(chunk.text for chunk in asking.stream(served.QUESTION))

    assert whole.text == streamed == model(max_tokens=16).invoke(served.QUESTION).text


@covers("errors")
def test_errors() -> None:
    """They are the openai package's classes, with the server's words."""
    with pytest.raises(openai.BadRequestError, match="temperature"):
        model(temperature=-1).invoke("Hi")
    with pytest.raises(openai.NotFoundError, match="nobody"):
        model(model="nobody").invoke("Hi")
    with pytest.raises(openai.AuthenticationError):
        model(api_key="wrong").invoke("Hi")


@covers("cancel")
def test_a_closed_stream_is_cancelled() -> None:
    """Workers hold nothing soon after the generator is closed."""
    long = model(max_tokens=served.LONG, extra_body={"ignore_eos": True})
    stream: Any = long.stream(served.QUESTION)
    for chunk in stream:
        if chunk.content:
            break
    assert served.running() > 0
    stream.close()

    assert served.becomes(False)


@covers("batch")
def test_many_at_once() -> None:
    """``batch`` keeps the order of its prompts."""
    texts = [" ".join(["word"] * number) for number in range(1, served.MANY + 1)]
    answers = model().batch(texts)

    counts = [answer.usage_metadata["input_tokens"] for answer in answers]
    assert counts == list(range(counts[0], counts[0] + served.MANY))
