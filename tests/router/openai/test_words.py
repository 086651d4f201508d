"""What an error says: the field as the client wrote it, the value as JSON, what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router.http_server import Served

from tandem.router.http.errors import MAX_SHOWN, written

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: dict[str, Any] = {"prompt": "Hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "extra", "message"),
    [
        ("chat", {"tools": [{"type": 5}]}, "tools[0].type: 5 is not allowed;"),
        ("chat", {"tool_choice": {"type": "function"}}, 'tool_choice: {"type": "function"} is'),
        ("chat", {"documents": [{"a": "b"}]}, 'documents: [{"a": "b"}] is not allowed; leave it'),
        ("chat", {"reasoning_effort": "bogus"}, 'reasoning_effort: "bogus" is not allowed;'),
        ("chat", {"stop": ""}, 'stop: "" is not allowed; strings of at least one character'),
        ("chat", {"stop": ["a", ""]}, 'stop: "" is not allowed; strings of at least one'),
        ("chat", {"bad_words": [""]}, 'bad_words: "" is not allowed'),
        ("chat", {"logprobs": True, "top_logprobs": 50}, "top_logprobs: 50 is not allowed; 0 to"),
        ("chat", {"max_completion_tokens": 9999}, "and max_completion_tokens=9999 is asked for"),
        ("chat", {"max_completion_tokens": 2, "min_tokens": 3}, "at most max_completion_tokens"),
        ("chat", {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens: 1 is not allowed;"),
        ("chat", {"service_tier": 17}, "service_tier: 17 is not allowed; a text: "),
        ("chat", {"store": "no"}, 'store: "no" is not allowed; true or false: answers of chats'),
        ("chat", {"response_format": {"type": "structural_tag"}}, "response_format.format: null"),
        ("chat", {"response_format": {"type": "xml"}}, 'response_format.type: "xml" is not'),
        ("chat", {"response_format": {"type": "text", "triggers": [""]}}, "response_format.trig"),
        ("chat", {"temperature": None, "n": True}, "n: true is not allowed;"),
        ("completions", {"prompt": ""}, 'prompt: "" is not allowed; a prompt of at least one'),
        ("completions", {"prompt": ["a", ""]}, 'prompt[1]: "" is not allowed; a prompt of'),
        ("completions", {"prompt": ["a", [50_001]]}, "prompt[1]: 50001 is not allowed; token ids"),
        ("completions", {"prompt": []}, "prompt: [] is not allowed;"),
        ("completions", {"prompt": ["a", []]}, "prompt[1]: [] is not allowed;"),
        ("completions", {"logprobs": 50}, "logprobs: 50 is not allowed; 0 to 20 on this server"),
        ("completions", {"stop_token_ids": [1, -1, 10**6]}, "stop_token_ids: [-1, 1000000] is"),
        ("completions", {"truncation_side": "left"}, 'truncation_side: "left" is not allowed; o'),
        ("completions", {"seed": 10**400}, "seed: "),
    ],
)
def test_an_error_names_field_value_and_what_is_allowed(
    well: Served, path: str, extra: dict[str, Any], message: str
) -> None:
    """In the client's own words, and param is the same field."""
    body, path = (CHAT, "chat/completions") if path == "chat" else (TEXT, path)
    answer = well.post(f"/v1/{path}", json={**body, **extra})
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert message in error["message"]
    assert error["message"].startswith(f"{error['param']}: ")


@pytest.mark.parametrize(
    "content", ['{"messages": NaN}', '{"prompt": "x", "n": NaN}', '{"n": 1e999}']
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_numbers_that_json_has_not_are_a_clients_fault(
    well: Served, path: str, content: str
) -> None:
    """What one parser of JSON takes and another does not is 400, never 500."""
    assert well.post(path, content=content).status_code == 400


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    )
)
def test_any_value_is_a_short_text(value: object) -> None:
    """One that can be sent, whatever a client sent."""
    text = written(value)

    assert len(text) <= MAX_SHOWN
    assert text.encode().decode() == text


def test_a_large_value_is_not_written_out() -> None:
    """Only what is shown is looked at: a list that counts who reads it is read a few times."""

    class Counted(list[int]):
        reads = 0

        def __iter__(self) -> Any:
            for each in super().__iter__():
                Counted.reads += 1
                yield each

    assert written(Counted(range(10**6))).endswith("...]")
    assert Counted.reads < 100
    assert written("x" * 10**6).endswith("...")
    assert "300 digits" in written(10**1000)
