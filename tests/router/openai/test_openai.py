"""The unmodified openai package against the app: what it asks for and what it makes of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from tests.router.http_server import ANSWER, Served
from tests.waiting import wait_for

from tandem.text.output_processor import EchoedPrompt, echoed_prompt
from tandem.text.tokenizer import Tokenizer

CHAT: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(well: Served) -> Iterator[Any]:
    with well.client() as client:
        yield client


def test_chat(well: Served, client: Any) -> None:
    """A chat is answered, with usage, by a hand-off."""
    answer = client.chat.completions.create(model="fake", messages=CHAT)

    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    expected = len(well.workers[0].answer) + 1
    assert answer.usage.completion_tokens == expected
    assert answer.usage.prompt_tokens == len(well.workers[0].submitted[-1].prompt_token_ids)
    assert well.workers[1].submitted[-1].kv is not None


def test_chat_stream(client: Any) -> None:
    """Chunks join to the same text; the role comes first, the reason last, then the usage."""
    stream = client.chat.completions.create(
        model="fake", messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 10
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks[:-1])


def test_usage_in_every_chunk(client: Any) -> None:
    stream = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]

    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > 10


@pytest.mark.parametrize("stream", [False, True])
def test_choices(well: Served, client: Any, stream: bool) -> None:
    """n=2 gives two choices, each with its own text."""
    common = {"model": "fake", "messages": CHAT, "n": 2, "max_tokens": 4}
    texts = {0: "", 1: ""}
    if stream:
        for chunk in client.chat.completions.create(stream=True, **common):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        answer = client.chat.completions.create(**common)
        texts = {choice.index: choice.message.content for choice in answer.choices}

    ids = well.workers[0].answer[:4]
    assert texts[0] == well.tokenizer.decode(ids)
    assert texts[1] == well.tokenizer.decode([token + 1 for token in ids])


def test_max_tokens(client: Any) -> None:
    """Length ends a choice; one token is enough for an answer."""
    answer = client.chat.completions.create(model="fake", messages=CHAT, max_tokens=1)

    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_across_tokens(well: Served, client: Any, stream: bool) -> None:
    """A stop string ends the text wherever token borders lie, and cancels the rest."""
    common = {"model": "fake", "messages": CHAT, "stop": ["tal of Fr"]}
    if stream:
        chunks = list(client.chat.completions.create(stream=True, **common))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**common)
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason

    assert text == "Paris is the capi"
    assert reason == "stop"
    key = well.workers[1].submitted[-1].key
    wait_for(lambda: (key.request, 0) in well.workers[1].cancelled)


def test_chat_logprobs(well: Served, client: Any) -> None:
    """Chat's shape: token, value, bytes, and the best ones."""
    answer = client.chat.completions.create(
        model="fake", messages=CHAT, logprobs=True, top_logprobs=2, max_tokens=3
    )
    logprobs = answer.choices[0].logprobs

    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(each.token for each in logprobs.content) == "Paris is the"
    assert logprobs.content[0].bytes == list(b"Paris")
    assert [len(each.top_logprobs) for each in logprobs.content] == [2, 2, 2]


def test_chat_logprobs_in_a_stream(client: Any) -> None:
    """Every token has its own, also those without text of their own."""
    stream = client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, stream=True)
    tokens = [
        each
        for chunk in stream
        for choice in chunk.choices
        if choice.logprobs and choice.logprobs.content
        for each in choice.logprobs.content
    ]

    data = b"".join(bytes(each.bytes or []) for each in tokens)
    assert data.decode().startswith(ANSWER)
    assert all(each.top_logprobs == [] for each in tokens)


def test_completion(client: Any) -> None:
    """16 tokens unless more are asked for."""
    answer = client.completions.create(model="fake", prompt="Tell me")

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert ANSWER.startswith(answer.choices[0].text)
    assert answer.choices[0].finish_reason == "length"


def test_completion_stream(client: Any) -> None:
    """Chunks join to the same text."""
    stream = client.completions.create(
        model="fake",
        prompt="Tell me",
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)

    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == ANSWER
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
def test_batch_of_prompts(well: Served, client: Any, stream: bool) -> None:
    """Texts and ids, two choices each: choices are numbered through."""
    ids = well.tokenizer.encode("the other one")
    common = {"model": "fake", "n": 2, "max_tokens": 3, "echo": True}
    texts = dict.fromkeys(range(4), "")
    for prompts in (["first", "second"], [ids, ids]):
        texts = dict.fromkeys(range(4), "")
        if stream:
            for chunk in client.completions.create(prompt=prompts, stream=True, **common):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        else:
            answer = client.completions.create(prompt=prompts, **common)
            texts = {choice.index: choice.text for choice in answer.choices}
            assert answer.usage.completion_tokens == 12
        if prompts[0] == "first":
            assert texts[0].startswith("firstParis")
            assert texts[3].startswith("second")

    assert texts[2].startswith("the other oneParis")


def test_echo_with_logprobs(well: Served, client: Any) -> None:
    """The prompt's own log-probabilities come first; its first token has none."""
    answer = client.completions.create(
        model="fake", prompt="Tell me more", max_tokens=2, echo=True, logprobs=1
    )
    choice = answer.choices[0]

    assert choice.text == "Tell me moreParis is"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    assert [
        choice.text[at : at + len(token)]
        for at, token in zip(choice.logprobs.text_offset, choice.logprobs.tokens, strict=True)
    ] == choice.logprobs.tokens
    assert well.workers[1].submitted[-1].kv is None


def test_echo_without_logprobs_tokenizes_nothing_again(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text that came is shown; what is left of one that was cut is found by its tokens."""
    echoed: list[str | None] = []

    def echo(tokenizer: Tokenizer, text: str | None, ids: Sequence[int]) -> EchoedPrompt:
        echoed.append(text)
        return echoed_prompt(tokenizer, text, ids)

    monkeypatch.setattr("tandem.llm.async_llm.echoed_prompt", echo)
    common = {"model": "fake", "prompt": "Tell me  more", "max_tokens": 1, "echo": True}
    assert client.completions.create(**common).choices[0].text == "Tell me  moreParis"
    assert echoed == []
    cut = client.completions.create(**common, extra_body={"truncate_prompt_tokens": 1})
    assert cut.choices[0].text == " moreParis"
    assert echoed == ["Tell me  more"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_only(client: Any, stream: bool) -> None:
    """echo with max_tokens=0 scores the prompt and generates nothing."""
    common = {"model": "fake", "prompt": "Tell me", "max_tokens": 0, "echo": True, "logprobs": 0}
    if stream:
        choice = list(client.completions.create(stream=True, **common))[0].choices[0]  # noqa: RUF015
    else:
        answer = client.completions.create(**common)
        assert answer.usage.completion_tokens == 0
        choice = answer.choices[0]

    assert choice.text == "Tell me"
    assert choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == "Tell me"


def test_models(client: Any) -> None:
    """The list and the single model; another is not found."""
    listed = client.models.list().data

    assert [model.id for model in listed] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_vllm_extras(well: Served, client: Any) -> None:
    """Fields beyond OpenAI's reach the engine, and its extras come back."""
    answer = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=2,
        temperature=0.5,
        seed=7,
        logit_bias={"5": 1},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "bad_words": ["Berlin"],
            "allowed_token_ids": [1, 2, 3],
            "prompt_logprobs": 1,
            "skip_special_tokens": False,
            "return_token_ids": True,
            "cache_salt": "mine",
            "chat_template_kwargs": {"x": 1},
            "user": "u",
        },
    )
    request = well.workers[1].submitted[-1]
    params = request.params

    assert (params.seed, params.top_k, params.min_p) == (7, 3, 0.1)
    assert (params.stop_token_ids, params.ignore_eos, params.min_tokens) == ((9,), True, 1)
    assert params.logit_bias == {5: 1.0}
    assert params.bad_words_token_ids
    assert params.allowed_token_ids == (1, 2, 3)
    assert request.cache_salt == "mine"
    assert answer.model_extra is not None
    assert answer.model_extra["prompt_token_ids"] == request.prompt_token_ids
    assert len(answer.model_extra["prompt_logprobs"]) == len(request.prompt_token_ids)
    extra = answer.choices[0].model_extra
    assert extra is not None
    assert extra["token_ids"] == well.workers[1].answer[:2]


def test_vllm_extras_of_completions(well: Served, client: Any) -> None:
    """The same in the other shape; logprobs without echo begin at 0."""
    answer = client.completions.create(
        model="fake",
        prompt="Tell me",
        max_tokens=2,
        logprobs=1,
        extra_body={"prompt_logprobs": 0, "return_token_ids": True},
    )
    choice = answer.choices[0]

    assert choice.model_extra["token_ids"] == well.workers[1].answer[:2]
    assert choice.model_extra["prompt_token_ids"] == well.tokenizer.encode("Tell me")
    assert choice.model_extra["prompt_logprobs"][0] is None
    assert len(choice.model_extra["prompt_logprobs"][1]) == 1
    assert choice.logprobs.text_offset == [0, 5]


def test_token_ids_in_a_stream(well: Served, client: Any) -> None:
    """return_token_ids: the prompt's with the first chunk, each token's with its own."""
    stream = client.chat.completions.create(
        model="fake",
        messages=CHAT,
        max_tokens=3,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]

    prompt = well.workers[0].submitted[-1].prompt_token_ids
    assert chunks[0].model_extra == {"prompt_token_ids": prompt}
    assert all(chunk.model_extra == {} for chunk in chunks[1:])
    assert [t for e in extras[1:] for t in e["token_ids"]] == well.workers[0].answer[:3]


def test_continue_final_message(well: Served, client: Any) -> None:
    """The assistant's own words are gone on with, and echoed if that is wanted."""
    answer = client.chat.completions.create(
        model="fake",
        messages=[*CHAT, {"role": "assistant", "content": "Well, "}],
        max_tokens=1,
        extra_body={"continue_final_message": True, "echo": True},
    )

    assert answer.choices[0].message.content == "Well, Paris"
    prompt = well.tokenizer.decode(well.workers[0].submitted[-1].prompt_token_ids)
    assert prompt.rstrip().endswith("Well,")


def test_request_id_is_echoed(client: Any) -> None:
    raw = client.chat.completions.with_raw_response
    by_header = raw.create(
        model="fake", messages=CHAT, max_tokens=1, extra_headers={"X-Request-Id": "mine-1"}
    )
    by_body = raw.create(
        model="fake", messages=CHAT, max_tokens=1, extra_body={"request_id": "mine-2"}
    )

    assert by_header.headers["x-request-id"] == "mine-1"
    assert by_header.parse().id == "chatcmpl-mine-1"
    assert by_body.headers["x-request-id"] == "mine-2"
