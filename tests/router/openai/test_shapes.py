"""Where answers hold what: vLLM's extras, nulls, offsets, and a chunk for each step."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
CHAT: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 3,
}
TEXT: dict[str, Any] = {"model": "fake", "prompt": "Hi there", "max_tokens": 3}
PATHS = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


def post(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = served.post(path, json=body)
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = served.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def test_what_was_not_asked_for_is_null(well: Served) -> None:
    """A client that reads a field finds it, as with vLLM."""
    chat = post(well, *PATHS[0])
    text = post(well, *PATHS[1])["choices"][0]

    for name in ("prompt_logprobs", "prompt_token_ids", "prompt_text"):
        assert chat[name] is None
    assert chat["choices"][0]["token_ids"] is None
    for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
        assert text[name] is None


def test_the_prompt_of_a_chat_is_told_in_text(well: Served) -> None:
    """return_prompt_text: what the chat template made, with the answer or its first chunk."""
    body = {**CHAT, "return_prompt_text": True}
    whole, first = post(well, PATHS[0][0], body), chunks(well, PATHS[0][0], body)[0]

    assert whole["prompt_text"] == first["prompt_text"]
    assert whole["prompt_text"].startswith("<|im_start|>")


def test_token_ids_of_a_completion_stream(well: Served) -> None:
    """In the choice: the prompt's with the first chunk of each choice, then each step's."""
    body = {**TEXT, "prompt": ["Hi there", "you"], "return_token_ids": True}
    choices = [each["choices"][0] for each in chunks(well, "/v1/completions", body)]

    for index, prompt in enumerate(body["prompt"]):
        mine = [each for each in choices if each["index"] == index]
        assert mine[0]["prompt_token_ids"] == well.tokenizer.encode(prompt)
        assert all("prompt_token_ids" not in each for each in mine[1:])
        assert [token for each in mine for token in each["token_ids"]] == well.workers[0].answer[:3]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_a_step_without_text_is_a_chunk_all_the_same(
    serve: Serve, decode: Make, path: str, body: dict[str, Any]
) -> None:
    """A load tool takes the time between chunks for that between tokens."""
    served = serve(decode())
    served.workers[0].answer = [0] * 20  # a special token, which has no text of its own
    body = {**body, "max_tokens": 20, "ignore_eos": True}
    told = [each for each in chunks(served, path, body) if "role" not in str(each["choices"][0])]

    assert len(told) == 20


def test_unknown_ids_are_named(well: Served) -> None:
    size = well.tokenizer.vocab_size
    answer = well.post("/detokenize", json={"tokens": [5, size, 1, 10**6]})
    error = answer.json()["error"]

    assert answer.status_code == 400
    assert error["param"] == "tokens"
    assert f"[{size}, 1000000] is not allowed; token ids from 0 to {size - 1}" in error["message"]


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
    ],
)
def test_all_logprobs_are_refused_where_the_server_has_a_limit(
    well: Served, path: str, extra: dict[str, Any], param: str
) -> None:
    """The error says the limit, and the rule for -1."""
    answer = well.post(path, json={**(CHAT if "chat" in path else TEXT), **extra})

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert "--max-logprobs -1" in answer.json()["error"]["message"]


def test_all_logprobs_are_a_number_to_the_workers(serve: Serve, decode: Make) -> None:
    """Where the workers allow it -1 stands for the whole vocabulary."""
    served = serve(decode(vocab_size=257, max_logprobs=257))
    served.workers[0].answer = [70, 71]
    body = {**CHAT, "logprobs": True, "top_logprobs": -1, "max_tokens": 1}
    answer = post(served, "/v1/chat/completions", body)

    assert served.workers[0].submitted[-1].params.logprobs == 257
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 257


@pytest.mark.parametrize(
    ("bias", "words"),
    [
        (
            {"x": 1, "5": 1, "y": 1, "-1": 1},
            'logit_bias: ["x", "y", "-1"] is not allowed; token ids',
        ),
        ({"50001": 1, "5": 1, "60000": 1}, "logit_bias: [50001, 60000] is not allowed; token ids"),
        ({"5": 101, "6": 1, "7": -101}, 'logit_bias: {"5": 101.0, "7": -101.0} is not allowed'),
        ({"0_5": 1}, 'logit_bias: "0_5"'),
    ],
)
def test_every_bad_bias_is_named_at_once(well: Served, bias: dict[str, int], words: str) -> None:
    """A client mends them all in one go."""
    answer = well.post("/v1/completions", json={**TEXT, "logit_bias": bias})

    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_agrees_with_its_offsets(well: Served, stream: bool) -> None:
    """Ids with special tokens are spelled out; every token stands where its offset says."""
    prompt = well.tokenizer.encode("<|im_start|>user\nHi 😀<|im_end|>\n")
    body = {**TEXT, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 40}
    if stream:
        parts = [each["choices"][0] for each in chunks(well, "/v1/completions", body)]
    else:
        parts = post(well, "/v1/completions", body)["choices"]
    text = "".join(each["text"] for each in parts)
    tokens = [token for each in parts for token in each["logprobs"]["tokens"]]
    offsets = [at for each in parts for at in each["logprobs"]["text_offset"]]

    assert text.startswith("<|im_start|>user\nHi 😀<|im_end|>\nParis")
    assert len(tokens) == len(offsets) == len(prompt) + len(well.workers[0].answer) + 1
    for token, at in zip(tokens[:-1], offsets[:-1], strict=True):
        assert text[at : at + len(token)] == token or "\ufffd" in token
    assert (tokens[-1], offsets[-1]) == ("<|im_end|>", len(text))


@pytest.mark.parametrize(
    "said",
    [
        {"content": "Well,\nnow "},
        {"content": [{"type": "text", "text": "Well,"}, {"type": "text", "text": "now "}]},
        {"content": [{"type": "refusal", "refusal": "Well,"}, "now "]},
        {"content": None, "refusal": "Well,\nnow "},
    ],
)
@pytest.mark.parametrize("continued", [True, False])
def test_whatever_form_a_last_message_has_it_is_echoed(
    well: Served, said: dict[str, Any], continued: bool
) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", **said}]
    body = {**CHAT, "messages": messages, "echo": True, "continue_final_message": continued}
    whole = post(well, PATHS[0][0], body)["choices"][0]["message"]["content"]
    first = chunks(well, PATHS[0][0], body)[0]["choices"][0]["delta"]["content"]

    assert whole.startswith("Well,\nnow Paris")
    assert first == "Well,\nnow "
