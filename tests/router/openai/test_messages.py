"""The Messages API by the unmodified anthropic package: blocks, events, tools and forms."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import ANSWER, Served
from tests.router.openai.test_tool_calls import CALLS, write_model

from tandem.protocol.card import WorkerRole

if TYPE_CHECKING:
    import anthropic  # takes seconds to import

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
TOOLS: Any = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]
ASK: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500}


def client_of(served: Served, **settings: Any) -> anthropic.Anthropic:
    import anthropic

    fields = {"api_key": "none", "max_retries": 0, "timeout": 20, **settings}
    return anthropic.Anthropic(base_url=served.url, **fields)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that writes hermes and thinks."""
    folder = tmp_path_factory.mktemp("messaging-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE)
    app = Served(str(folder), [worker])
    yield app
    app.stop()
    worker.stop()


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as client:
        yield client


@pytest.fixture
def say(served: Served) -> Callable[[str], None]:

    def say(text: str) -> None:
        served.workers[0].answer = served.tokenizer.encode(text, add_special_tokens=False)

    return say


def prompt_of(served: Served) -> str:
    ids = served.workers[0].submitted[-1].prompt_token_ids
    return served.tokenizer.decode(list(ids), skip_special_tokens=False)


def told(message: Any) -> list[Any]:
    found: list[Any] = []
    for block in message.content:
        if block.type == "text":
            found.append(("text", block.text))
        elif block.type == "thinking":
            found.append(("thinking", block.thinking))
        else:
            found.append((block.name, block.input))
    return found


SAID = [("thinking", "Hm 😀."), ("text", "Well. "), ("f", {"a": "é"}), ("g", {})]


def test_a_whole_message(client: anthropic.Anthropic, say: Callable[[str], None]) -> None:
    """Text, why it ended, and tokens."""
    say("Well said.")
    answer = client.messages.create(**ASK, metadata={"user_id": "me"})

    assert told(answer) == [("text", "Well said.")]
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.output_tokens == len("Well said.") + 1
    assert answer.usage.output_tokens_details is not None
    assert answer.usage.output_tokens_details.thinking_tokens == 0


def test_blocks_are_told_apart_whole_and_streamed(
    client: anthropic.Anthropic, say: Callable[[str], None]
) -> None:
    """Thoughts, text and two calls: the stream's accumulated message is the whole one."""
    say(CALLS)
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        final = stream.get_final_message()

    assert told(whole) == told(final) == SAID
    assert whole.stop_reason == final.stop_reason == "tool_use"
    assert whole.usage == final.usage
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens == len("Hm 😀.".encode()) + 1


def test_events_have_their_order(client: anthropic.Anthropic, say: Callable[[str], None]) -> None:
    """Each block begins, goes on and ends before the next one does."""
    say(CALLS)
    events: list[Any] = list(client.messages.create(**ASK, tools=TOOLS, stream=True))
    kinds = [event.type for event in events]

    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert events[0].message.usage.input_tokens > 0
    at = -1
    for event in events[1:-2]:
        at += event.type == "content_block_start"
        assert event.index == at
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "text_delta", "input_json_delta"]
    assert deltas.count("input_json_delta") > 5


def test_a_stream_pings(served: Served, say: Callable[[str], None]) -> None:
    """The package drops it, so its bytes are looked at; nothing follows message_stop."""
    say("Well.")
    text = served.post("/v1/messages", json={**ASK, "stream": True}).text
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]

    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-1] == "message_stop"
    assert "[DONE]" not in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["said"]}, "stop_sequence", "said"),
        ({"max_tokens": 2046, "messages": [{"role": "user", "content": "x" * 2040}]}, None, None),
    ],
)
def test_why_a_message_ended(
    client: anthropic.Anthropic,
    say: Callable[[str], None],
    fields: Any,
    reason: str | None,
    sequence: str | None,
    stream: bool,
) -> None:
    """Its length and a stop sequence; more tokens than there are room for are refused."""
    from anthropic import BadRequestError

    say("Well said. And more.")

    def ask() -> Any:
        if not stream:
            return client.messages.create(**{**ASK, **fields})
        with client.messages.stream(**{**ASK, **fields}) as events:
            return events.get_final_message()

    if reason is None:
        with pytest.raises(BadRequestError, match="context length"):
            ask()
        return
    answer = ask()
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_results_of_tools_go_back(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """The package's own blocks as history, with a system text and what is to be cached."""
    say(CALLS)
    first = client.messages.create(**ASK, tools=TOOLS)
    calls = [block for block in first.content if block.type == "tool_use"]
    cached: Any = {"type": "ephemeral"}
    results: Any = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "42"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1].id,
            "content": [{"type": "text", "text": "no"}],
            "is_error": True,
        },
        {"type": "text", "text": "Go on.", "cache_control": cached},
    ]
    history: Any = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    say("Done.")
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": cached}]
    answer = client.messages.create(
        model="fake", max_tokens=50, system=system, messages=history, tools=TOOLS
    )

    assert told(answer) == [("text", "Done.")]
    assert prompt_of(served) == "TOOL f Be brief.HiWell. 42Error: noGo on."


def test_an_assistants_last_message_goes_on(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """The answer begins where it ends."""
    say("llo")
    history: Any = [*ASK["messages"], {"role": "assistant", "content": "He"}]
    answer = client.messages.create(**{**ASK, "messages": history})

    assert told(answer) == [("text", "llo")]
    assert prompt_of(served) == "HiHe"


def test_a_thought_that_a_last_message_left_open_goes_on(
    client: anthropic.Anthropic, say: Callable[[str], None]
) -> None:
    say(" so.</think>Hello")
    opened: Any = {"role": "assistant", "content": [{"type": "text", "text": "<think>Hm, or"}]}
    answer = client.messages.create(**{**ASK, "messages": [*ASK["messages"], opened]})

    assert told(answer) == [("thinking", " so."), ("text", "Hello")]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "f"}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_forced(
    client: anthropic.Anthropic,
    served: Served,
    say: Callable[[str], None],
    choice: Any,
    stream: bool,
) -> None:
    """The worker is held to calls, one where no more are wanted."""
    say('[{"name":"f","parameters":{"a":1}}]')
    wanted: Any = {"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    if stream:
        with client.messages.stream(**ASK, **wanted) as events:
            answer: Any = events.get_final_message()
    else:
        answer = client.messages.create(**ASK, **wanted)

    assert told(answer) == [("f", {"a": 1})]
    assert answer.stop_reason == "tool_use"
    structured: Any = served.workers[0].submitted[-1].params.structured_outputs
    assert '"maxItems":1' in (structured.json or structured.structural_tag)


def test_calls_may_be_left_out(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """With none the template shows the tools, and calls stay text."""
    say(CALLS)
    answer = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "none"})

    assert prompt_of(served) == "TOOL f Hi"
    assert {block.type for block in answer.content} == {"thinking", "text"}


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_is_parsed_into_a_class(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """``parse`` of the package, which asks by output_config; the worker is held to the schema."""
    say('{"name": "Ada", "age": 36}')
    answer = client.messages.parse(**ASK, output_format=Person)
    wanted: Any = served.workers[0].submitted[-1].params.structured_outputs

    assert answer.parsed_output == Person(name="Ada", age=36)
    assert json.loads(wanted.json)["required"] == ["name", "age"]


def test_whether_the_model_is_to_think(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """What the template has for it; a budget is the worker's."""
    say("Well.")
    client.messages.create(**ASK, thinking={"type": "disabled"})
    assert prompt_of(served) == "Hi<think></think>"
    client.messages.create(**ASK, thinking={"type": "adaptive"})
    assert prompt_of(served) == "Hi"
    client.messages.create(**ASK, extra_body={"thinking": {"type": "enabled"}})
    assert prompt_of(served) == "Hi"
    client.messages.create(**ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    assert served.workers[0].submitted[-1].params.thinking_token_budget == 1024


def test_sampling_reaches_the_worker(
    client: anthropic.Anthropic, served: Served, say: Callable[[str], None]
) -> None:
    """Under the names that workers have."""
    say("Well.")
    more = {"temperature": 0.5, "top_p": 0.25, "top_k": 3}
    client.messages.create(**ASK, stop_sequences=["x"], extra_body=more)
    params = served.workers[0].submitted[-1].params

    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.25, 3)
    assert (params.max_tokens, params.stop) == (500, ("x",))


def test_tokens_are_counted_as_they_are_billed(
    client: anthropic.Anthropic, say: Callable[[str], None]
) -> None:
    """A count is what the same messages have as input tokens."""
    say("Well.")
    fields: Any = {"messages": ASK["messages"], "tools": TOOLS, "system": "Be brief."}
    count = client.messages.count_tokens(model="fake", **fields)
    usage = client.messages.create(model="fake", max_tokens=5, **fields).usage

    assert count.input_tokens == usage.input_tokens == len("TOOL f Be brief.Hi")


def test_cached_tokens_are_counted_apart(serve: Serve, decode: Make) -> None:
    """As Anthropic has it: input tokens are those that were not cached."""
    served = serve(decode(num_cached=3))
    with client_of(served) as client:
        usage = client.messages.create(**ASK).usage
        total = client.messages.count_tokens(model="fake", messages=ASK["messages"]).input_tokens

    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens == total - 3


def test_the_answer_of_the_embedded_models_tokenizer(well: Served) -> None:
    """Characters of several tokens arrive whole."""
    with client_of(well) as client:
        whole = client.messages.create(**ASK)
        with client.messages.stream(**ASK) as stream:
            assert "".join(stream.text_stream) == ANSWER

    assert told(whole) == [("text", ANSWER)]
