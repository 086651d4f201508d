"""Bodies that libraries send by default, as recorded, are taken as they are."""

from __future__ import annotations

from typing import Any

import pytest
from tests.router.http_server import Served

ASK: list[dict[str, Any]] = [{"content": "hi", "role": "user"}]
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
AGENT: list[dict[str, Any]] = [
    {"content": "s", "role": "system"},
    {"content": "q", "role": "user"},
    {"content": None, "role": "assistant", "tool_calls": [CALL]},
    {"content": "r", "role": "tool", "tool_call_id": "c1"},
]
LANGCHAIN_TEXT = {
    "prompt": ["hi"],
    "frequency_penalty": 0,
    "logprobs": None,
    "max_tokens": 256,
    "n": 1,
    "presence_penalty": 0,
    "seed": None,
    "temperature": 0.7,
    "top_p": 1,
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("chat/completions", {"stream": False, "messages": ASK}, id="langchain"),
        pytest.param("chat/completions", {"stream": True, "messages": ASK}, id="langchain-stream"),
        pytest.param("chat/completions", {"stream": False, "messages": AGENT}, id="agent"),
        pytest.param(
            "chat/completions",
            {
                "messages": ASK,
                "logprobs": True,
                "max_completion_tokens": 5,
                "n": 1,
                "seed": 1,
                "stop": ["x"],
                "temperature": 0.0,
                "top_logprobs": 2,
            },
            id="langchain-all",
        ),
        pytest.param("completions", LANGCHAIN_TEXT, id="langchain-text"),
        pytest.param("completions", {**LANGCHAIN_TEXT, "stream": True}, id="langchain-text-stream"),
        pytest.param("chat/completions", {"messages": ASK, "stream": True}, id="litellm"),
        pytest.param("completions", {"prompt": "hi"}, id="litellm-text"),
    ],
)
def test_what_libraries_send_by_default_is_taken(
    well: Served, path: str, body: dict[str, Any]
) -> None:
    """langchain-openai 1.7.3 and litellm 1.83.0, as of 2026-11; pydantic-ai's are the same."""
    answer = well.post(f"/v1/{path}", json={"model": "fake", **body})

    assert answer.status_code == 200, answer.text


def test_an_answer_of_the_openai_package_may_be_sent_back(well: Served) -> None:
    """Clients keep the message object of an answer as history, nulls and all."""
    with well.client() as client:
        first = client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}]
        )
        said: Any = first.choices[0].message
        history: Any = [*ASK, said, said.model_dump(), {"role": "user", "content": "more"}]
        again = client.chat.completions.create(model="fake", messages=history)

    assert again.choices[0].message.content
