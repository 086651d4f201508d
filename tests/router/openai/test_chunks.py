"""Chunks of a stream, joined from prepared parts, are the JSON of a plain encoder."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tandem.protocol.outputs import FinishReason
from tandem.router.api.openai.answers.chunks import chat_writer, completion_writer, usage


def data_of(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    return json.loads(event[6:])


@pytest.mark.parametrize("index", [0, 7, 8, 127])
@pytest.mark.parametrize("says_usage", [False, True])
def test_chunks_are_json(index: int, says_usage: bool) -> None:
    """The prepared parts join to what a plain encoder would have made."""
    text = 'quote " backslash \\ newline \n é 😀 \u2028'
    chat = chat_writer(stream_id='i"d', created=5, model="m", says_usage=says_usage)
    plain = data_of(chat.text(index, text))
    choice = {
        "index": index,
        "delta": {"content": text},
        "logprobs": None,
        "finish_reason": None,
    }
    expected: dict[str, Any] = {
        "id": 'i"d',
        "object": "chat.completion.chunk",
        "created": 5,
        "model": "m",
        "choices": [choice],
    }
    if says_usage:
        expected["usage"] = None
    assert plain == expected

    done = completion_writer(stream_id="i", created=5, model="m", says_usage=says_usage)
    said = usage(1, 2, None)
    full = data_of(
        done.full(
            index,
            text,
            finish=FinishReason.STOP,
            stop_reason=7,
            extras={"token_ids": [1]},
            usage=said,
        )
    )
    assert full["choices"] == [
        {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 7,
            "token_ids": [1],
        }
    ]
    assert full["usage"] == said
    assert data_of(done.last_usage(said))["choices"] == []
    assert data_of(done.raw(index, b'"text":""'))["choices"][0]["text"] == ""
