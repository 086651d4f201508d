"""Agents' loops over three turns through the router, by the chat templates of models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served
from tokenizers import decoders, models, pre_tokenizers

from tandem.protocol.card import WorkerRole

TEMPLATES = Path(__file__).parents[2] / "text" / "templates"
CALLS = {
    "Mistral-Small-3.2-24B-Instruct-2506": '[TOOL_CALLS]read_file[ARGS]{{"path": "{}',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{{"name": "read_file", "arguments": '
    '{{"path": "{}',
    "unsloth-mistral-Devstral-Small-2507": '[TOOL_CALLS]read_file[ARGS]{{"path": "{}',
    "Qwen-Qwen3-0.6B": '<tool_call>\n{{"name": "read_file", "arguments": {{"path": "{}',
    "Qwen3-Coder": "<tool_call>\n<function=read_file>\n<parameter=path>\n{}",
}
ENDS = {
    "mistralai-Mistral-Nemo-Instruct-2407": '"}}]',
    "Qwen-Qwen3-0.6B": '"}}\n</tool_call>',
    "Qwen3-Coder": "\n</parameter>\n</function>\n</tool_call>",
}
"""What ends a call; the others end with their arguments."""
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
SYSTEM = ["Be brief.", "Read files."]


@pytest.fixture(scope="module", params=CALLS)
def agent(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Agent]:
    """A model with one of the templates: a token per byte."""
    folder = tmp_path_factory.mktemp("agent")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "bos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    source = (TEMPLATES / f"{request.param}.jinja").read_text()
    (folder / "chat_template.jinja").write_text(source)
    worker = FakeWorker(WorkerRole.DECODE, max_model_len=100_000, step=0.0)
    app = Served(str(folder), [worker])
    yield Agent(app, worker, request.param)
    app.stop()
    worker.stop()


class Agent:
    """A model that calls, and its router."""

    def __init__(self, served: Served, worker: FakeWorker, name: str) -> None:
        self._served, self._worker, self._name = served, worker, name

    def calls(self, path: str, *, whole: bool = True) -> int:
        """Have the model call next; how many tokens that takes."""
        text = CALLS[self._name].format(path) + ENDS.get(self._name, '"}') * whole
        self._worker.answer = self._served.tokenizer.encode(text, add_special_tokens=False)
        return len(self._worker.answer)

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """A call of an API, which is answered."""
        answer = self._served.post(path, json={"model": "fake", **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def prompt(self) -> str:
        ids = self._worker.submitted[-1].prompt_token_ids
        return self._served.tokenizer.decode(ids)


def shown(prompt: str, *texts: str) -> None:
    """A prompt has all texts in their order."""
    at = 0
    for text in texts:
        found = prompt.find(text, at)
        assert found >= 0, (text, prompt)
        at = found + len(text)


def check(prompt: str, *, behind: str) -> None:
    shown(prompt, *SYSTEM)
    shown(prompt, "Fix it.", "text of a", "src/ma", "no JSON object", behind, "And be quick.")


@pytest.mark.full
def test_a_chats_third_turn_is_whole(agent: Agent) -> None:
    """System text in parts, ids of ours, a call that was cut off, two users' messages in a row."""
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": SCHEMA}}]
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": each} for each in SYSTEM]},
        {"role": "user", "content": "Fix it."},
    ]

    def turn(num_tokens: int) -> Any:
        body = {"messages": chat, "tools": tools, "max_tokens": num_tokens}
        message = agent.ask("/v1/chat/completions", body)["choices"][0]["message"]
        chat.append({"role": "assistant", **message})
        return message["tool_calls"][0]

    call = turn(agent.calls("a") + 1)
    chat.append({"role": "tool", "tool_call_id": call["id"], "content": "text of a"})
    cut = turn(agent.calls("src/ma", whole=False))
    chat.append({"role": "tool", "tool_call_id": cut["id"], "content": "no JSON object"})
    chat.append({"role": "user", "content": "Again."})
    chat.append({"role": "user", "content": "And be quick."})
    turn(agent.calls("src/main") + 1)

    assert call["id"].startswith("call_"), "clients see their own ids"
    check(agent.prompt(), behind="Again.")


def test_a_responses_third_turn_is_whole(agent: Agent) -> None:
    """As Codex sends it: instructions, developers' messages, users' messages in a row."""
    tools = [{"type": "function", "name": "read_file", "parameters": SCHEMA}]
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": SYSTEM[1]}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Fix it."}]},
    ]

    def turn(num_tokens: int) -> Any:
        body = {"instructions": SYSTEM[0], "input": items, "tools": tools, "store": False}
        answer = agent.ask("/v1/responses", {**body, "max_output_tokens": num_tokens})
        items.extend(answer["output"])
        return answer["output"][-1]

    def result(call: dict[str, Any], text: str) -> None:
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": text})

    result(turn(agent.calls("a") + 1), "text of a")
    result(turn(agent.calls("src/ma", whole=False)), "no JSON object")
    items.append({"role": "user", "content": "Again."})
    items.append({"role": "user", "content": "And be quick."})
    turn(agent.calls("src/main") + 1)

    check(agent.prompt(), behind="Again.")


def test_a_messages_third_turn_is_whole(agent: Agent) -> None:
    """As Claude Code sends it: blocks, results and texts in one message, its own ids."""
    tools = [{"name": "read_file", "input_schema": SCHEMA}]
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]

    def turn(num_tokens: int) -> None:
        system = [{"type": "text", "text": each} for each in SYSTEM]
        body = {"system": system, "messages": chat, "tools": tools, "max_tokens": num_tokens}
        answer = agent.ask("/v1/messages", body)
        assert answer["content"][-1]["type"] == "tool_use"
        number = len(chat)
        call = {**answer["content"][-1], "id": f"toolu_01A09q90qw90lq91783{number:04}"}
        chat.append({"role": "assistant", "content": [call]})

    def result(*texts: str) -> None:
        given = {"type": "tool_result", "tool_use_id": chat[-1]["content"][0]["id"]}
        blocks = [{"type": "text", "text": text} for text in texts[1:]]
        chat.append({"role": "user", "content": [{**given, "content": texts[0]}, *blocks]})

    turn(agent.calls("a") + 1)
    result("text of a")
    turn(agent.calls("src/ma") + 1)
    result("no JSON object", "Again.", "And be quick.")
    turn(agent.calls("src/main") + 1)

    check(agent.prompt(), behind="Again.")
