"""The Responses API by the unmodified openai package: items, events, turns, forms and calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import ANSWER, Served
from tests.router.openai.test_tool_calls import CALLS, write_model

from tandem.protocol.card import WorkerRole
from tandem.router.api.openai.responses.writer import ResponseWriter

TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}]
ASK: Any = {"model": "fake", "input": "Hi", "max_output_tokens": 500}
DELTAS = ("output_text", "reasoning_text", "function_call_arguments")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that writes hermes and thinks."""
    folder = tmp_path_factory.mktemp("responding-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE)
    app = Served(str(folder), [worker])
    yield app
    app.stop()
    worker.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


@pytest.fixture
def say(served: Served) -> Callable[[str], None]:

    def say(text: str) -> None:
        served.workers[0].answer = served.tokenizer.encode(text, add_special_tokens=False)

    return say


def prompt_of(served: Served) -> str:
    ids = served.workers[0].submitted[-1].prompt_token_ids
    return served.tokenizer.decode(list(ids), skip_special_tokens=False)


def told(response: Any) -> list[Any]:
    found: list[Any] = []
    for item in response.output:
        if item.type == "message":
            found.append(("message", item.content[0].text))
        elif item.type == "reasoning":
            found.append(("reasoning", item.content[0].text))
        else:
            found.append((item.name, item.arguments))
    return found


SAID = [("reasoning", "Hm 😀."), ("message", "Well. "), ("f", '{"a": "é"}'), ("g", "{}")]


def test_a_whole_response(client: openai.OpenAI, say: Callable[[str], None]) -> None:
    """Text, usage, and what was asked for beside it."""
    say("Well said.")
    answer = client.responses.create(**ASK, metadata={"a": "b"}, temperature=0.5, user="me")

    assert answer.output_text == "Well said."
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.metadata, answer.temperature, answer.user) == ({"a": "b"}, 0.5, "me")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("Well said.") + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


def test_items_are_told_apart_whole_and_streamed(
    client: openai.OpenAI, say: Callable[[str], None]
) -> None:
    """Reasoning, text and two calls: the stream's accumulated response is the whole one."""
    say(CALLS)
    whole = client.responses.create(**ASK, tools=TOOLS)
    usage: Any = {"stream_options": {"include_usage": True}}  # as of chats: some clients say it
    with client.responses.stream(**ASK, tools=TOOLS, extra_body=usage) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert told(whole) == told(final) == SAID
    assert whole.usage is not None
    assert whole.usage == final.usage
    assert whole.usage.output_tokens_details.reasoning_tokens == len("Hm 😀.".encode()) + 1
    assert events[-1].type == "response.completed"


def test_events_have_their_order_and_numbers(
    client: openai.OpenAI, say: Callable[[str], None]
) -> None:
    """Numbers without gaps; what deltas bring is what done events and items hold."""
    say(CALLS)
    events: list[Any] = list(client.responses.create(**ASK, tools=TOOLS, stream=True))
    kinds = [event.type for event in events]

    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"
    for name in DELTAS:
        joined: dict[int, str] = {}
        for event in events:
            if event.type == f"response.{name}.delta":
                joined[event.output_index] = joined.get(event.output_index, "") + event.delta
        done = {e.output_index: e for e in events if e.type == f"response.{name}.done"}
        assert joined
        for index, event in done.items():
            whole = event.arguments if "arguments" in name else event.text
            assert whole == joined.get(index, "")
    done_items = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done_items] == [item.id for item in events[-1].response.output]
    assert all(item.status == "completed" for item in done_items)
    parts = [kinds.count(f"response.content_part.{what}") for what in ("added", "done")]
    assert parts == [2, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_is_incomplete(
    client: openai.OpenAI, say: Callable[[str], None], stream: bool
) -> None:
    say("Well said.")
    answer: Any = client.responses.create(**{**ASK, "max_output_tokens": 3}, stream=stream)
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        answer = last.response

    assert (answer.status, answer.output_text) == ("incomplete", "Wel")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [20, None])
def test_many_log_probabilities_are_written_in_a_thread(
    client: openai.OpenAI,
    say: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    top: int | None,
) -> None:
    """Those of the whole response, and in a stream those of an item that a call ends; few are
    not."""
    threads: dict[str, list[str]] = {"take": [], "end": []}
    for name, called in threads.items():
        noting = partial(noted, getattr(ResponseWriter, name), called)
        monkeypatch.setattr(ResponseWriter, name, partialmethod(noting))
    say("Well said. " * 13 + '<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    include: Any = [] if top is None else ["message.output_text.logprobs"]
    fields: Any = {**ASK, "tools": TOOLS, "include": include, "top_logprobs": top}
    answer = client.responses.create(**fields, stream=stream)
    list(answer) if stream else None

    assert [each.startswith("beside") for each in threads["end"]] == [top is not None]
    is_beside = [each for each in threads["take"] if each.startswith("beside")]
    assert len(is_beside) == (stream and top is not None)


def noted(function: Callable[..., bytes], threads: list[str], *given: Any) -> bytes:
    """What the function says, and on which thread it was asked."""
    threads.append(threading.current_thread().name)
    return function(*given)


def test_turns_go_on_from_the_one_before(
    client: openai.OpenAI, served: Served, say: Callable[[str], None]
) -> None:
    """The prompt has all that was said before; instructions are not carried over."""
    say("One.")
    first = client.responses.create(**ASK, instructions="Be brief.")
    assert prompt_of(served) == "Be brief.Hi"
    say("Two.")
    more: Any = {**ASK, "input": [{"role": "user", "content": "More"}]}
    second = client.responses.create(**more, previous_response_id=first.id)
    assert prompt_of(served) == "HiOne.More"
    client.responses.delete(first.id)
    client.responses.create(**{**ASK, "input": "Again"}, previous_response_id=second.id)

    assert prompt_of(served) == "HiOne.MoreTwo.Again"
    assert second.previous_response_id == first.id
    items: Any = client.responses.input_items.list(second.id, order="asc")
    texts = [each.content[0].text for each in items.data]
    assert texts == ["Hi", "One.", "More"]
    page = client.responses.input_items.list(second.id, limit=2)
    assert [each.id for each in page] == [each.id for each in reversed(items.data)]


def test_a_call_and_its_result_go_back(
    client: openai.OpenAI, served: Served, say: Callable[[str], None]
) -> None:
    """By items in the input, as the package's objects; and by the response before."""
    say('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    first = client.responses.create(**ASK, tools=TOOLS)
    call: Any = first.output[0]
    say("Done.")
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    history: Any = [{"role": "user", "content": "Hi"}, *first.output, result]
    for fields in ({"input": history}, {"input": [result], "previous_response_id": first.id}):
        answer = client.responses.create(**{**ASK, **fields}, tools=TOOLS)
        assert answer.output_text == "Done."
        assert prompt_of(served).endswith("Hi42")


def test_stored_responses_are_given_again(
    client: openai.OpenAI, say: Callable[[str], None]
) -> None:
    """Until they are deleted; with store=false never."""
    say("One.")
    first = client.responses.create(**ASK)
    streamed = list(client.responses.create(**ASK, stream=True))[-1]
    kept: Any = streamed

    assert client.responses.retrieve(first.id) == first
    assert client.responses.retrieve(kept.response.id) == kept.response
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    unstored = client.responses.create(**ASK, store=False).id
    for gone in (first.id, unstored, "resp_x"):
        for ask in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
            client.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError, match=gone):
                ask(gone)
        with pytest.raises(openai.NotFoundError, match=gone) as error:
            client.responses.create(**ASK, previous_response_id=gone)
        assert error.value.param == "previous_response_id"


class Person(BaseModel):
    name: str
    age: int


def test_an_answer_is_parsed_into_a_class(
    client: openai.OpenAI, served: Served, say: Callable[[str], None]
) -> None:
    """``parse`` of the package; the worker is held to the schema."""
    say('{"name": "Ada", "age": 36}')
    whole = client.responses.parse(**ASK, text_format=Person)
    with client.responses.stream(**ASK, text_format=Person) as stream:
        final = stream.get_final_response()
    wanted: Any = served.workers[0].submitted[-1].params.structured_outputs

    assert whole.output_parsed == final.output_parsed == Person(name="Ada", age=36)
    assert json.loads(wanted.json)["required"] == ["name", "age"]
    client.responses.create(**ASK, text={"format": {"type": "json_object"}})
    wanted = served.workers[0].submitted[-1].params.structured_outputs
    assert wanted.json_object


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_are_forced(
    client: openai.OpenAI, served: Served, say: Callable[[str], None], choice: Any, stream: bool
) -> None:
    """The worker is held to a list of calls, which become items."""
    say('[{"name":"f","parameters":{"a":1}}]')
    answer: Any = client.responses.create(**ASK, tools=TOOLS, tool_choice=choice, stream=stream)
    response = list(answer)[-1].response if stream else answer
    wanted: Any = served.workers[0].submitted[-1].params.structured_outputs

    assert told(response) == [("f", '{"a":1}')]
    assert response.status == "completed"
    assert json.loads(wanted.json)["type"] == "array"


def test_log_probabilities_are_those_of_the_text(
    client: openai.OpenAI, say: Callable[[str], None]
) -> None:
    """With include: no thought's, no call's; deltas bring what the item holds."""
    say(CALLS)
    include: Any = ["message.output_text.logprobs"]
    fields: Any = {**ASK, "tools": TOOLS, "include": include, "top_logprobs": 2}
    whole: Any = client.responses.create(**fields)
    events: Any = list(client.responses.create(**fields, stream=True))
    text = next(item for item in whole.output if item.type == "message").content[0]
    deltas = [p for e in events if e.type == "response.output_text.delta" for p in e.logprobs]

    assert "".join(each.token for each in text.logprobs).strip().startswith("Well")
    assert all(len(each.top_logprobs) == 2 for each in text.logprobs)
    assert "".join(each.token for each in deltas).strip().startswith("Well")


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(
    client: openai.OpenAI, served: Served, say: Callable[[str], None]
) -> None:
    """With truncation=auto; instructions stay, and the last turn. Else it is refused."""
    say("Well.")
    turns: Any = [{"role": "user", "content": f"<{n}>" + "x" * 300} for n in range(10)]
    fields: Any = {**ASK, "input": turns, "instructions": "Be brief.", "max_output_tokens": 20}
    client.responses.create(**fields, truncation="auto")
    seen = prompt_of(served)

    assert seen.startswith("Be brief.<")
    assert seen.endswith("<9>" + "x" * 300)
    assert "<3>" not in seen
    assert "<5>" in seen
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**fields)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    long: Any = {**ASK, "input": "x" * 3000}
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**long, truncation="auto")


def test_the_answer_of_the_embedded_models_tokenizer(well: Served) -> None:
    """Characters of several tokens arrive whole."""
    with well.client() as client:
        whole = client.responses.create(model="fake", input="Hi")
        events: Any = list(client.responses.create(model="fake", input="Hi", stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]

    assert whole.output_text == "".join(deltas) == ANSWER
