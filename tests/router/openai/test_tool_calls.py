"""Calls of tools and reasoning over HTTP: whole and streamed answers of the real router."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import tokenizers
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tokenizers import decoders, models, pre_tokenizers

from tandem.llm.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from tandem.protocol.card import WorkerRole
from tandem.protocol.errors import InvalidParameter
from tandem.router.api.openai.answers.answer_reader import ChatReader
from tandem.router.api.openai.bodies.schemas import ChatBody
from tandem.router.config import RouterConfig
from tandem.text.output_processor import Logprob
from tandem.text.parsers.model import ModelParsers

TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is false %}<think></think>{% endif %}{# <tool_call> #}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPECIAL = ["<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<|noise|>"]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CHAT: Any = [{"role": "user", "content": "Hi"}]
CALLS = (
    '<think>Hm 😀.</think>\n\nWell<|noise|>. <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n'
    '</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model that writes hermes and thinks: a token per byte, its marks special tokens."""
    folder = tmp_path_factory.mktemp("calling-model")
    write_model(folder)
    worker = FakeWorker(WorkerRole.DECODE)
    app = Served(str(folder), [worker])
    yield app
    app.stop()
    worker.stop()


def write_model(folder: Path) -> None:
    """A tokenizer of no merges and the chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def ask(served: Served) -> Callable[..., Any]:
    """Have the worker say something, and ask with the openai package."""

    def ask(text: str, **fields: Any) -> Any:
        served.workers[0].answer = served.tokenizer.encode(text, add_special_tokens=False)
        with served.client() as client:
            common = {"model": "fake", "messages": CHAT, "max_tokens": 500, **fields}
            answer = client.chat.completions.create(**common)
            return list(answer) if fields.get("stream") else answer

    return ask


def joined(chunks: list[Any]) -> dict[str, Any]:
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            said["content"] += delta["content"] or ""
            said["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(said["calls"]):
                    assert (call["type"], bool(call["id"])) == ("function", True)
                    said["calls"].append([call["function"]["name"], ""])
                said["calls"][call["index"]][1] += call["function"]["arguments"]
            said["finish"] = choice.finish_reason or said.get("finish")
    return said


def whole(answer: Any) -> dict[str, Any]:
    """The same of an answer that is no stream."""
    choice = answer.choices[0]
    message = choice.message.model_dump()
    assert message.get("reasoning") == message.get("reasoning_content")
    calls = message["tool_calls"] or ()
    return {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [[each["function"]["name"], each["function"]["arguments"]] for each in calls],
        "finish": choice.finish_reason,
    }


@pytest.mark.parametrize("stream", [False, True])
def test_content_reasoning_and_calls_are_told_apart(ask: Callable[..., Any], stream: bool) -> None:
    """Whole and streamed say the same; special tokens that are no marks stay hidden."""
    answer = ask(CALLS, tools=TOOLS, stream=stream)

    assert (joined if stream else whole)(answer) == {
        "content": "Well. ",
        "reasoning": "Hm 😀.",
        "calls": [["f", '{"a": "é"}'], ["g", "{}"]],
        "finish": "tool_calls",
    }


def test_arguments_come_in_many_deltas(ask: Callable[..., Any]) -> None:
    """A stream does not wait for a call's end."""
    chunks = ask(CALLS, tools=TOOLS, stream=True)
    with_arguments = [
        chunk
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or ()
        if call.index == 0
    ]

    assert len(with_arguments) > 5


def test_the_usage_counts_reasoning(ask: Callable[..., Any]) -> None:
    """From the mark that begins a thought to the one that ends it, which counts."""
    options = {"include_usage": True}
    answer = ask(CALLS, tools=TOOLS)
    last = ask(CALLS, tools=TOOLS, stream=True, stream_options=options)[-1]
    wanted = len("Hm 😀.".encode()) + 1

    assert answer.usage.completion_tokens_details.reasoning_tokens == wanted
    assert last.usage.completion_tokens_details.reasoning_tokens == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_false_tells_the_first(ask: Callable[..., Any], stream: bool) -> None:
    answer = ask(CALLS, tools=TOOLS, parallel_tool_calls=False, stream=stream)

    assert len((joined if stream else whole)(answer)["calls"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_include_reasoning_false_leaves_it_out(ask: Callable[..., Any], stream: bool) -> None:
    """Content and calls are as ever."""
    extra = {"include_reasoning": False}
    said = (joined if stream else whole)(ask(CALLS, tools=TOOLS, extra_body=extra, stream=stream))

    assert said["reasoning"] == ""
    assert len(said["calls"]) == 2


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_calls_are_content(ask: Callable[..., Any], fields: Any) -> None:
    """Nobody could answer them; the prompt shows the tools all the same."""
    said = whole(ask(CALLS, **fields))

    assert said["calls"] == []
    assert '{"name": "f"' in said["content"]
    assert said["finish"] == "stop"
    assert said["reasoning"] == "Hm 😀."


def test_a_cut_call_ends_by_length(ask: Callable[..., Any]) -> None:
    """Its arguments are what came; a client sees why."""
    said = whole(ask(CALLS, tools=TOOLS, max_tokens=60))

    assert said["finish"] == "length"
    assert said["calls"][0][1].startswith('{"a"')


def test_a_template_that_closes_the_thought_leaves_none(
    served: Served, ask: Callable[..., Any]
) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    said = whole(ask("Hello", extra_body=extra))
    prompt = list(served.workers[0].submitted[-1].prompt_token_ids)

    assert said["content"] == "Hello"
    assert served.tokenizer.token_id("</think>") in prompt


def test_a_budget_of_thinking_reaches_the_worker(served: Served, ask: Callable[..., Any]) -> None:
    """With the marks as ids, and whether the prompt has begun the thought; none where it has
    ended it, and where there is no budget."""
    tokens = served.tokenizer.token_id
    for budget, closed in ((0, False), (5, False), (-1, False), (5, True)):
        more = {"chat_template_kwargs": {"enable_thinking": False}} if closed else {}
        ask("Hello", extra_body={"thinking_token_budget": budget, **more})
        params = served.workers[0].submitted[-1].params
        assert params.thinking_token_budget == budget
        if closed or budget < 0:
            assert params.thinking is None
        else:
            assert params.thinking is not None
            assert params.thinking.opens == ((tokens("<think>"),),)
            assert (params.thinking.close, params.thinking.has_begun) == (tokens("</think>"), False)
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget: -2 is not allowed"):
        ask("Hello", extra_body={"thinking_token_budget": -2})


def test_choices_are_told_apart_each_for_itself(ask: Callable[..., Any]) -> None:
    """n choices have n parsers (the worker's second says something else), with all their tokens."""
    answer = ask(CALLS, tools=TOOLS, n=2, logprobs=True)
    first, second = answer.choices

    assert len(first.message.tool_calls) == 2
    assert second.message.tool_calls is None
    assert (first.finish_reason, first.index, second.index) == ("tool_calls", 0, 1)
    assert sum(len(c.logprobs.content) for c in answer.choices) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": TOOLS * 1_025}, "tools"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"include_reasoning": 1}, "include_reasoning"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    served: Served, fields: dict[str, Any], param: str
) -> None:
    """An answer never lacks silently what was asked for."""
    body = {"model": "fake", "messages": CHAT, "tools": TOOLS, **fields}
    answer = served.post("/v1/chat/completions", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_a_model_without_a_format_refuses_tools(serve: Callable[..., Served]) -> None:
    """Its template reads them; a flag may name the format of its calls."""
    worker = FakeWorker(WorkerRole.DECODE)
    app = serve(worker, tool_call_parser="none")
    templates: Any = app.app.state.service.llm.tokenizer.chat_templates
    templates._sources["default"] = TEMPLATE
    body = {"model": "fake", "messages": CHAT, "tools": TOOLS}
    answer = app.post("/v1/chat/completions", json=body)
    worker.stop()

    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]


def test_unknown_parsers_end_the_start() -> None:
    """The error lists what there is."""
    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(InvalidParameter, match=f"{name}.*auto, none"):
            RouterConfig(**cast("Any", {name: "hermess"}))


def test_a_template_that_shows_calls_and_reads_no_tools_refuses_them(
    serve: Callable[..., Served],
) -> None:
    """The model knows a format of its own, in which it cannot be shown them."""
    worker = FakeWorker(WorkerRole.DECODE)
    app = serve(worker)
    templates: Any = app.app.state.service.llm.tokenizer.chat_templates
    templates._sources["default"] = "{# <tool_call> #}" + PLAIN
    body = {"model": "fake", "messages": CHAT}
    refused = app.post("/v1/chat/completions", json={**body, "tools": TOOLS})
    worker.stop()

    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools"


def test_a_template_without_a_word_for_tools_gets_them_as_text(well: Served) -> None:
    """SmolLM2's has none and thinks not: a chat without tools has no members of either."""
    body = {"model": "fake", "messages": CHAT}
    answer = well.post("/v1/chat/completions", json={**body, "tools": TOOLS})
    prompt = well.tokenizer.decode(list(well.workers[-1].submitted[-1].prompt_token_ids))
    message = well.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]

    assert answer.status_code == 200
    assert '<tools>\n{"name": "f"' in prompt
    assert set(message) == {"role", "content", "refusal"}


def test_log_probabilities_are_kept_in_one_list() -> None:
    """What came before is not copied for each token; what came is not changed."""
    reader = ChatReader(ChatBody(messages=CHAT, logprobs=True), ModelParsers())
    drawn = Logprob(token_id=5, logprob=-0.5, rank=1, decoded_token="a", bytes=b"a")
    one = PositionLogprobs(drawn, ())
    given: list[list[PositionLogprobs]] = []
    kept: list[object] = []
    for _ in range(3):
        given.append([one])
        choice = CompletionOutput(index=0, text="a", token_ids=[5], logprobs=given[-1])
        output = RequestOutput(
            request_id="r",
            prompt="Hi",
            prompt_token_ids=[1],
            prompt_logprobs=None,
            outputs=[choice],
            finished=False,
            num_cached_tokens=0,
            num_generated_tokens=1,
        )
        reader.take(output, choice)
        kept.append(reader.choices[0].logprobs)

    assert kept[0] == [one] * 3
    assert all(each is kept[0] for each in kept)
    assert given == [[one]] * 3
