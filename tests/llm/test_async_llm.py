"""AsyncLLM over any client: text, aborts, errors."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.cpu_pool import IN_LOOP
from tandem.llm.outputs import RequestOutput
from tandem.llm.sampling import Params
from tandem.protocol.commands import CommandName
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.errors import FailCause, InvalidParameter, RequestFailed
from tandem.protocol.ids import new_incarnation
from tandem.protocol.outputs import FinishReason
from tandem.protocol.sampling import OutputKind, SamplingParams
from tandem.text.chat_template import ChatOptions
from tandem.text.errors import ContextLengthExceeded
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import TextPrompt
from tandem.text.tokenizer import Tokenizer

DELTA = {"output_kind": "delta"}
FINAL = {"output_kind": "final_only"}
Make = Callable[..., Any]


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def texts(outputs: list[RequestOutput], choice: int = 0) -> str:
    found = (each for output in outputs for each in output.outputs if each.index == choice)
    return "".join(each.text for each in found)


async def test_a_prompt_streams_its_text(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Deltas, the prompt, usage, and a finish at the end; nothing is aborted."""
    client = make_client(says("naïve 😀"))
    llm = AsyncLLM(client, tokenizer)

    outputs = await collect(llm.generate("hi", DELTA, "mine"))

    assert texts(outputs) == "naïve 😀"
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == FinishReason.LENGTH
    assert outputs[-1].num_generated_tokens == len("naïve 😀".encode())
    assert (outputs[-1].num_cached_tokens, outputs[-1].prompt) == (16, "hi")
    assert list(outputs[-1].prompt_token_ids) == tokenizer.encode("hi")
    assert (client.aborted, llm.num_running) == ([], 0)


async def test_what_a_caller_says_of_a_request_reaches_the_client(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """The very value that was given; without one the request is an ordinary one."""
    client = make_client(says("a"))
    llm, context = AsyncLLM(client, tokenizer), RequestContext(arrived=1.0)
    prepared = [await llm.prepare("hi") for _ in range(2)]

    await collect(llm.stream(prepared[0], context))
    await collect(llm.stream(prepared[1]))

    assert client.contexts == [context, ORDINARY]


async def test_the_models_own_defaults_fill_what_is_left_open(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """From generation_config.json; what is not allowed there is left out; a struct is complete."""
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)

    for params in (None, {"temperature": 1.5}, SamplingParams()):
        await collect(llm.generate("hi", params))

    assert [request.params.temperature for request in client.requests] == [0.25, 1.5, 1.0]
    assert {request.params.top_p for request in client.requests} == {1.0}


@pytest.mark.parametrize(
    ("params", "most"),
    [
        (None, 2_048),
        ({"min_tokens": 3_000}, 3_000),
        ({"max_tokens": 3_000}, 3_000),
        (SamplingParams(), 39_998),
    ],
)
async def test_the_models_own_max_tokens_give_way(
    tokenizer: Tokenizer,
    says: Make,
    make_client: Make,
    monkeypatch: pytest.MonkeyPatch,
    params: Params,
    most: int,
) -> None:
    """To the room that a prompt leaves, and to what the client says; a struct is complete."""
    monkeypatch.setattr(tokenizer, "generation", {"max_new_tokens": 2_048})
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)
    await collect(llm.generate("hi", params))
    await collect(llm.chat([{"role": "user", "content": "a" * 39_000}]))

    assert [each.params.max_tokens for each in client.requests] == [most, 999]


async def test_keys_are_ours_and_name_this_process(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Two requests of one client id, one after the other, are two keys of one incarnation."""
    me = new_incarnation()
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer, incarnation=me)

    await collect(llm.generate("hi", None, "same"))
    await collect(llm.generate("hi", None, "same"))
    unnamed = await collect(llm.generate("hi"))

    keys = [request.key for request in client.requests]
    assert len({key.request for key in keys}) == 3
    assert {key.router for key in keys} == {me}
    assert unnamed[0].request_id == keys[2].request


async def test_an_id_that_runs_is_refused(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """A second stream under a running id never reaches the engine."""
    client = make_client(says("abc"), hangs=True)
    llm = AsyncLLM(client, tokenizer)
    async with aclosing(llm.generate("hi", DELTA, "x")) as first:
        await anext(first)

        with pytest.raises(InvalidParameter, match=r"^request_id: 'x'"):
            await collect(llm.generate("hi", DELTA, "x"))
        assert llm.num_running == 1

    assert len(client.requests) == 1
    assert llm.num_running == 0


async def test_an_id_is_free_with_the_last_output(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Before the first stream is closed, and closing that frees nothing of the second."""
    client = make_client(says("a"), hangs=True)
    llm = AsyncLLM(client, tokenizer)
    async with aclosing(llm.generate("hi", DELTA, "x")) as first:
        assert (await anext(first)).finished

        client.script = says("ab")
        async with aclosing(llm.generate("hi", DELTA, "x")) as second:
            await anext(second)
            await first.aclose()
            assert llm.num_running == 1


async def test_closing_a_stream_aborts_the_request(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """A client that goes away frees what it held."""
    client = make_client(says("abcdef"), hangs=True)
    llm = AsyncLLM(client, tokenizer)
    stream = llm.generate("hi", DELTA)

    await anext(stream)
    await stream.aclose()

    assert client.aborted == [client.requests[0].key.request]
    assert llm.num_running == 0


async def test_a_cancelled_task_aborts_the_request(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    client = make_client(says("", finish=None), hangs=True)
    llm = AsyncLLM(client, tokenizer)
    task = asyncio.create_task(collect(llm.chat([{"role": "user", "content": "hi"}])))
    await client.asked.wait()

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert len(client.aborted) == 1
    assert llm.num_running == 0


async def test_a_stop_string_ends_the_request_at_the_engine(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """The text ends before it, across tokens, and the engine is told to stop."""
    client = make_client(says("the end\n\nUser: more and more"), hangs=True)
    llm = AsyncLLM(client, tokenizer)

    outputs = await collect(llm.generate("hi", DELTA | {"stop": "\n\nUser:"}))

    assert texts(outputs) == "the end"
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "\n\nUser:")
    assert outputs[-1].finished
    assert len(client.aborted) == 1


async def test_other_choices_go_on_after_a_stop_string(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """One request for all choices; it is aborted only when the last has ended by one."""
    client = make_client(says("a.bcdefgh", "abcdefg.i"), hangs=True)
    llm = AsyncLLM(client, tokenizer)

    outputs = await collect(llm.generate("hi", DELTA | {"n": 2, "stop": ["."]}))

    assert (texts(outputs, 0), texts(outputs, 1)) == ("a", "abcdefg")
    assert [output.finished for output in outputs].count(True) == 1
    assert outputs[-1].num_generated_tokens == 2 + 8
    assert len(client.requests) == len(client.aborted) == 1


async def test_a_request_is_not_aborted_when_the_engine_ends_every_choice(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """A stop string of one choice, long past, needs no abort then."""
    client = make_client(says("a.b", "abcdef"))
    llm = AsyncLLM(client, tokenizer)

    outputs = await collect(llm.generate("hi", FINAL | {"n": 2, "stop": ["."]}))

    assert [each.text for each in outputs[0].outputs] == ["a", "abcdef"]
    assert len(outputs) == 1
    assert client.aborted == []


async def test_kinds_of_output(tokenizer: Tokenizer, says: Make, make_client: Make) -> None:
    """Cumulative texts grow; a final one comes once."""
    llm = AsyncLLM(make_client(says("abc")), tokenizer)

    grown = await collect(llm.generate("hi", SamplingParams()))
    final = await collect(llm.generate("hi", SamplingParams(output_kind=OutputKind.FINAL_ONLY)))

    assert [output.outputs[0].text for output in grown] == ["a", "ab", "abc"]
    assert [output.outputs[0].text for output in final] == ["abc"]


async def test_a_chat_is_sent_as_its_template_says(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """The prompt of the output is the rendered chat."""
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)
    chat = [{"role": "user", "content": "hi"}]

    outputs = await collect(
        llm.chat(chat, FINAL, "c", options=InputOptions(priority=1), chat=ChatOptions())
    )

    assert outputs[0].prompt == "hi!"
    assert await llm.encode_chat(chat) == list(outputs[0].prompt_token_ids)
    assert client.requests[0].priority == 1


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ("hi", {"temperature": 3}, InvalidParameter),
        ("hi", {"no_such": 3}, InvalidParameter),
        ("", None, InvalidParameter),
        ([1] * 40_000, None, ContextLengthExceeded),
    ],
)
async def test_bad_requests_reach_no_engine(
    tokenizer: Tokenizer,
    says: Make,
    make_client: Make,
    prompt: Any,
    params: Any,
    error: type[Exception],
) -> None:
    """The error comes before anything is sent."""
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)

    with pytest.raises(error):
        await llm.prepare(prompt, params)
    with pytest.raises(error):
        await collect(llm.generate(prompt, params))

    assert client.requests == []


async def test_what_the_engine_raises_comes_through(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """After the outputs before it; the id is free again."""
    failure = RequestFailed(FailCause.TIMEOUT, "too late", ("timeout",))
    half = says("ab", finish=None)
    llm = AsyncLLM(make_client(lambda request: [*half(request), failure]), tokenizer)
    stream = llm.generate("hi", DELTA, "x")

    assert texts([await anext(stream), await anext(stream)]) == "ab"
    with pytest.raises(RequestFailed, match="too late"):
        await anext(stream)
    assert llm.num_running == 0


async def test_an_engine_that_just_ends_is_an_error(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """Never a text that looks complete and is not."""
    llm = AsyncLLM(make_client(says("ab", finish=None)), tokenizer)

    with pytest.raises(RequestFailed, match="without finishing"):
        await collect(llm.generate("hi"))


async def test_long_texts_are_tokenized_beside_the_loop(
    tokenizer: Tokenizer, says: Make, make_client: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short ones are not: a thread costs more than they do."""
    llm = AsyncLLM(make_client(says("a")), tokenizer)
    threads: list[threading.Thread] = []
    encode = tokenizer.encode

    def watched(*args: Any, **kwargs: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(*args, **kwargs)

    monkeypatch.setattr(tokenizer, "encode", watched)
    long = "x" * IN_LOOP
    parts = [{"type": "text", "text": "x" * (IN_LOOP // 2)}, {"type": "text", "text": long}]
    for prompt in ("x", long, TextPrompt(long), {"prompt": long}):
        await llm.prepare(prompt)
    await llm.prepare_chat([{"role": "user", "content": parts}])

    main = threading.main_thread()
    assert [thread is main for thread in threads] == [True, False, False, False, False]


async def test_a_changed_card_changes_what_is_allowed(
    tokenizer: Tokenizer, says: Make, make_client: Make
) -> None:
    """A fleet may come to serve a shorter context; the next request sees it."""
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)
    await llm.prepare("hello")

    client.card = msgspec.structs.replace(client.card, max_model_len=4)

    with pytest.raises(ContextLengthExceeded):
        await llm.prepare("hello")
    assert (await llm.card()).max_model_len == 4


async def test_helpers_and_commands(tokenizer: Tokenizer, says: Make, make_client: Make) -> None:
    """Text and ids both ways, health, commands with ids of their own, close."""
    client = make_client(says("a"))
    llm = AsyncLLM(client, tokenizer)

    assert await llm.decode(await llm.encode("naïve")) == "naïve"
    await llm.check_health()
    assert (await llm.reset_prefix_cache()).ok
    await llm.call(CommandName.STATS, reset=True)
    await llm.close()

    assert [each.name for each in client.commands] == ["reset_prefix_cache", "stats"]
    assert client.commands[0].id != client.commands[1].id
    assert client.commands[1].args == {"reset": True}
    assert client.closed == 1
