"""Every parameter that clients may know is done, is information, or is refused by name.

The tables of docs/http.md and docs/reference/parameters.md, the schemas and the known parameters
of other servers must agree, and each row is tried.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save as safetensors
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tests.router.known_parameters import OF_CHATS, OF_COMPLETIONS
from tests.router.openai.parameters_page import listed

from tandem.router.api.openai.bodies import schemas
from tandem.router.api.openai.bodies.bounds import Body
from tandem.router.api.openai.bodies.parameters import Refused

pytestmark = pytest.mark.full

Make = Callable[..., FakeWorker]
Serve = Callable[..., Served]
PAGE = Path(__file__).parents[3] / "docs" / "http.md"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Hi there", "max_tokens": 2}
PATHS = {"chat": ("/v1/chat/completions", CHAT), "completions": ("/v1/completions", TEXT)}
BODIES: dict[str, type[Body]] = {
    "chat": schemas.ChatBody,
    "completions": schemas.CompletionBody,
}
OPEN = {
    "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "presence_penalty": 0.5,
    "frequency_penalty": 0.5, "repetition_penalty": 1.5, "stop_token_ids": [9],
    "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 1, "seed": 5,
    "prompt_logprobs": 2, "allowed_token_ids": [7, 8], "bad_words": ["Berlin"],
    "spaces_between_special_tokens": False, "stop": ["x"],
}  # fmt: skip
"""Sampling parameters that a worker gets under the same name."""

SAVED = safetensors({"prompt": torch.zeros(3, 4)})
"""A prompt of embeddings."""

See = Callable[[SimpleNamespace], object]
"""True for the effect of a parameter: in ``request``, what a worker got, or ``answer``."""


def rows(title: str) -> dict[str, tuple[str, ...]]:
    """Cells of the page's table under a title, by the parameter."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| `([\w.]+)` \| (\w+) \| (.*) \|$", section, re.MULTILINE)
    return {name: (of, *rest.split(" | ")) for name, of, rest in cells}


def documented(kind: str) -> dict[str, str]:
    """Parameters of an endpoint to the title that they stand under."""
    done = {
        name.partition(".")[0]
        for name, (of, *_) in rows("Parameters").items()
        if of in ("both", kind)
    }
    refused = {name.partition(".")[0] for name in listed("Refused", kind)}
    return {
        **dict.fromkeys(listed("Hints", kind), "Hints"),
        **dict.fromkeys(refused, "Refused"),
        **dict.fromkeys(done, "Parameters"),
    }


@pytest.mark.parametrize(("kind", "known"), [("chat", OF_CHATS), ("completions", OF_COMPLETIONS)])
def test_what_others_know_stands_on_the_page_and_in_the_schema(
    kind: str, known: frozenset[str]
) -> None:
    """No name of OpenAI's or vLLM's is left to chance, and the page tells nothing else."""
    body, told = BODIES[kind], documented(kind)
    done = {name for name, title in told.items() if title == "Parameters"}
    hinted = {name for name, title in told.items() if title == "Hints" and "." not in name}

    assert known <= set(told)
    assert done == set(body.model_fields) - set(body.HINTS)
    assert hinted == set(body.HINTS)
    assert {name for name, title in told.items() if title == "Refused"} == set(body.REFUSED)


def ask(served: Served, kind: str, extra: Mapping[str, Any]) -> SimpleNamespace:
    """What the workers got and the client saw, with more in the body."""
    path, body = PATHS[kind]
    answer = served.post(path, json={**body, **extra})
    assert answer.status_code == 200, answer.text
    request = served.workers[-1].submitted[-1]
    whole = None if extra.get("stream") else answer.json()
    return SimpleNamespace(request=request, params=request.params, answer=whole, http=answer)


def passes(name: str) -> See:
    """The worker has the value under the same name."""

    def see(seen: SimpleNamespace) -> bool:
        value, wanted = getattr(seen.params, name), OPEN[name]
        return bool(value == (tuple(wanted) if isinstance(wanted, list) else wanted))

    return see


def prompt_of(seen: SimpleNamespace) -> int:
    return len(seen.request.prompt_token_ids)


BOTH: dict[str, tuple[Mapping[str, Any], See]] = {
    **{name: ({name: value}, passes(name)) for name, value in OPEN.items()},
    "model": ({"model": "fake"}, lambda seen: seen.answer["model"] == "fake"),
    "n": ({"n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "max_tokens": ({"max_tokens": 1}, lambda seen: seen.params.max_tokens == 1),
    "vllm_xargs": (
        {"vllm_xargs": {"a": [1, "b"]}},
        lambda seen: seen.request.params.extra_args == {"a": [1, "b"]},
    ),
    "logit_bias": ({"logit_bias": {"5": 1}}, lambda seen: seen.params.logit_bias == {5: 1.0}),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 1}, lambda seen: prompt_of(seen) == 1),
    "truncation_side": (
        {"truncate_prompt_tokens": 1, "truncation_side": "right", "return_token_ids": True},
        lambda seen: prompt_of(seen) == 1,
    ),
    "cache_salt": ({"cache_salt": "s"}, lambda seen: seen.request.cache_salt == "s"),
    "priority": ({"priority": 2}, lambda seen: seen.request.priority == 2),
    "timeout": ({"timeout": 5}, lambda seen: 0 < (seen.request.budget_ms or 0) <= 5000),
    # What it does when the time has passed: test_deadlines.
    "partial_on_timeout": (
        {"partial_on_timeout": True},
        lambda seen: seen.answer["choices"][0]["finish_reason"] != "abort",
    ),
    "request_id": ({"request_id": "mine"}, lambda seen: seen.answer["id"].endswith("-mine")),
    "return_token_ids": (
        {"return_token_ids": True},
        lambda seen: len(seen.answer["choices"][0]["token_ids"]) == 2,
    ),
    "stream": ({"stream": True}, lambda seen: seen.http.text.endswith("data: [DONE]\n\n")),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda seen: '"usage":{' in seen.http.text,
    ),
    "structured_outputs": (
        {"structured_outputs": {"choice": ["yes", "no"]}},
        lambda seen: seen.params.structured_outputs.choice == ["yes", "no"],
    ),
    "response_format": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}},
        lambda seen: seen.params.structured_outputs.json == '{"type":"null"}',
    ),
    "add_special_tokens": ({"add_special_tokens": True}, lambda seen: prompt_of(seen) > 1),
}
CHATS: dict[str, tuple[Mapping[str, Any], See]] = {
    **BOTH,
    "messages": (
        {"messages": [{"role": "user", "content": "Hi " * 50}]},
        lambda seen: prompt_of(seen) > 50,
    ),
    "max_completion_tokens": (
        {"max_tokens": None, "max_completion_tokens": 1},
        lambda seen: seen.params.max_tokens == 1,
    ),
    "logprobs": ({"logprobs": True}, lambda seen: seen.answer["choices"][0]["logprobs"]),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 3},
        lambda seen: len(seen.answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3,
    ),
    "tools": (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        lambda seen: "TOOL f" in text_of(seen),
    ),
    "tool_choice": ({"tools": [], "tool_choice": "auto"}, lambda seen: seen.answer),
    "parallel_tool_calls": ({"parallel_tool_calls": False}, lambda seen: seen.answer),
    "thinking_token_budget": (  # what it does: tests/router/openai/test_tool_calls.py
        {"thinking_token_budget": -1},
        lambda seen: seen.request.params.thinking_token_budget == -1,
    ),
    "include_reasoning": (
        {"include_reasoning": False},
        lambda seen: "reasoning" not in seen.answer["choices"][0]["message"],
    ),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda seen: "EFFORT low" in text_of(seen)),
    "add_generation_prompt": (
        {"add_generation_prompt": False},
        lambda seen: not text_of(seen).endswith("OPEN"),
    ),
    "continue_final_message": (
        {"continue_final_message": True},
        lambda seen: text_of(seen).endswith("Hi"),
    ),
    "chat_template": ({"chat_template": "mine"}, lambda seen: text_of(seen) == "mine"),
    "chat_template_kwargs": (
        {"chat_template_kwargs": {"reasoning_effort": "kw"}},
        lambda seen: "EFFORT kw" in text_of(seen),
    ),
    "documents": ({"documents": [{"title": "d"}]}, lambda seen: "DOC d" in text_of(seen)),
    "return_prompt_text": (
        {"return_prompt_text": True},
        lambda seen: seen.answer["prompt_text"] == text_of(seen),
    ),
    "echo": (
        {
            "messages": [{"role": "assistant", "content": "Well"}],
            "echo": True,
            "continue_final_message": True,
        },
        lambda seen: seen.answer["choices"][0]["message"]["content"].startswith("Well"),
    ),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 70},
        lambda seen: seen.answer["choices"][0]["message"]["content"].endswith("<|end|>"),
    ),
}
COMPLETIONS: dict[str, tuple[Mapping[str, Any], See]] = {
    **BOTH,
    "prompt": ({"prompt": [5, 6]}, lambda seen: list(seen.request.prompt_token_ids) == [5, 6]),
    "prompt_embeds": (
        {"prompt": "", "prompt_embeds": base64.b64encode(SAVED).decode()},
        lambda seen: seen.request.prompt_embeds.num_tokens == 3,
    ),
    "logprobs": ({"logprobs": 1}, lambda seen: seen.answer["choices"][0]["logprobs"]["tokens"]),
    "best_of": ({"best_of": 2, "n": 2}, lambda seen: len(seen.answer["choices"]) == 2),
    "echo": (
        {"echo": True},
        lambda seen: seen.answer["choices"][0]["text"].startswith("Hi there"),
    ),
    "skip_special_tokens": (
        {"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 70},
        lambda seen: seen.answer["choices"][0]["text"].endswith("<|end|>"),
    ),
}
EFFECTS = {"chat": CHATS, "completions": COMPLETIONS}
TEMPLATE = (
    "{% for t in tools or [] %}TOOL {{ t.function.name }} {% endfor %}"
    "{% for d in documents or [] %}DOC {{ d.title }} {% endfor %}"
    "{% if reasoning_effort %}EFFORT {{ reasoning_effort }} {% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}OPEN{% endif %}"
)


def text_of(seen: SimpleNamespace) -> str:
    return str(seen.served.tokenizer.decode(list(seen.request.prompt_token_ids)))


@pytest.fixture
def reader(serve: Serve, decode: Make) -> Served:
    """A server that allows what may be allowed, of a model whose template reads everything."""
    served = serve(
        decode(prompt_embeds=4),
        trust_request_chat_template=True,
        allow_request_priority=True,
    )
    templates: Any = served.app.state.service.llm.tokenizer.chat_templates
    templates._sources["default"] = TEMPLATE
    return served


@pytest.mark.parametrize("kind", PATHS)
def test_what_is_done_has_an_effect(reader: Served, kind: str) -> None:
    """Each row under Done is tried: it shows in what a worker gets or a client sees."""
    wanted = set(BODIES[kind].model_fields) - set(BODIES[kind].HINTS)
    without = []
    for name, (extra, effect) in EFFECTS[kind].items():
        seen = ask(reader, kind, extra)
        seen.served = reader
        if not effect(seen):
            without.append(name)

    assert without == []
    assert wanted == set(EFFECTS[kind])


def odd_value(refused: Refused) -> object:
    return next(each for each in ({"a": 1}, 17) if each not in refused.neutral)


@pytest.mark.parametrize("kind", PATHS)
def test_what_is_refused_says_so_and_passes_with_values_that_ask_for_nothing(
    well: Served, kind: str
) -> None:
    """Each row under Refused is tried with another value, with null, and with every neutral one."""
    path, body = PATHS[kind]
    for name, refused in BODIES[kind].REFUSED.items():
        for value in (None, *refused.neutral):
            answer = well.post(path, json={**body, name: value})
            assert answer.status_code == 200, answer.text
        for value in (odd_value(refused), "bogus"):
            answer = well.post(path, json={**body, name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert error["message"].startswith(f"{name}: ")
            assert refused.why in error["message"]


@pytest.mark.parametrize("kind", PATHS)
def test_information_passes_and_has_a_shape(well: Served, kind: str) -> None:
    """Hints about the caller are bounded."""
    path, body = PATHS[kind]
    right: dict[str, Any] = {"metadata": {"a": "b"}}
    for name in sorted(set(BODIES[kind].HINTS) & set(BODIES[kind].model_fields)):
        value = right.get(name, "someone")
        answer = well.post(path, json={**body, name: value})
        wrong = well.post(path, json={**body, name: 17})
        long = well.post(path, json={**body, name: "x" * 513})

        assert answer.status_code == 200, answer.text
        assert (wrong.status_code, long.status_code) == (400, 400)
        assert wrong.json()["error"]["param"] == name
