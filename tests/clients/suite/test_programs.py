"""Clients in other languages: a program each, which tells what came, a JSON line for a feature."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.clients.suite import served

ENVIRONMENTS = Path(os.environ["TANDEM_CLIENTS_ENVIRONMENTS"])
NODE = ENVIRONMENTS / "node"
COMMANDS: dict[str, list[str]] = {
    "openai (npm)": [str(NODE / "node_modules/.bin/node"), str(NODE / "openai.mjs")],
    "ai (npm)": [str(NODE / "node_modules/.bin/node"), str(NODE / "ai.mjs")],
    "openai-go": [str(ENVIRONMENTS / "go/client")],
    "async-openai": [str(ENVIRONMENTS / "rust/debug/tandem-clients")],
}
COVERED: dict[str, list[str]] = {
    "openai (npm)": [
        "chat",
        "stream",
        "usage",
        "tools",
        "structured output",
        "logprobs",
        "embeddings",
        "responses",
        "errors",
        "batch",
        "cancel",
    ],
    "ai (npm)": [
        "chat",
        "stream",
        "usage",
        "tools",
        "structured output",
        "embeddings",
        "errors",
        "batch",
        "cancel",
    ],
    "openai-go": [
        "chat",
        "stream",
        "usage",
        "tools",
        "structured output",
        "logprobs",
        "embeddings",
        "responses",
        "errors",
        "batch",
        "cancel",
    ],
    "async-openai": [
        "chat",
        "stream",
        "usage",
        "tools",
        "structured output",
        "logprobs",
        "embeddings",
        "responses",
        "errors",
        "batch",
        "cancel",
    ],
}
SECONDS = 100.0
Facts = dict[str, Any]


def told(command: list[str]) -> dict[str, Facts]:
    """What one program told by the end; its stream is looked at from outside while it waits."""
    facts: dict[str, Facts] = {}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for line in program.stdout:
            fact = json.loads(line)
            feature = fact.pop("feature")
            if feature != "cancel":
                facts[feature] = fact
                continue
            wanted = fact["state"] == "running"
            facts.setdefault("cancel", {})[fact["state"]] = served.becomes(wanted)
            program.stdin.write("looked\n")
            program.stdin.flush()
        assert program.wait(SECONDS) == 0
    return facts


@pytest.fixture(scope="module")
def facts() -> Callable[[str], dict[str, Facts]]:
    kept: dict[str, dict[str, Facts]] = {}

    def facts(client: str) -> dict[str, Facts]:
        if client not in kept:
            kept[client] = told(COMMANDS[client])
        return kept[client]

    return facts


def check_usage(fact: Facts) -> None:
    """Both count what the server's tokenizer does."""
    assert fact["whole"] == fact["streamed"] == served.prompt_tokens()


def check_calls(fact: Facts) -> None:
    assert [list(call) for call in fact["calls"]] == [["city"], ["city"]]
    assert all(call["city"] in ("Paris", "Lyon") for call in fact["calls"])
    assert fact["text"]


def check_logprobs(fact: Facts) -> None:
    """A greedy token is the best of its alternatives."""
    assert fact["logprobs"] == fact["best"]
    assert all(value <= 0 for value in fact["logprobs"])


def check_errors(fact: Facts) -> None:
    """Each is the client's own error, with the server's words."""
    assert [error["status"] for error in fact["errors"]] == [400, 401, 404]
    assert all(error["kind"] for error in fact["errors"])
    words = ("temperature", "API key", "nobody")
    told = [error["message"] for error in fact["errors"]]
    assert all(word in message for word, message in zip(words, told, strict=True))


def check_batch(fact: Facts) -> None:
    """Each got the answer to its own prompt."""
    counts = fact["counts"]
    assert counts == list(range(counts[0], counts[0] + served.MANY))


CHECKS: dict[str, Callable[[Facts], None]] = {
    "usage": check_usage,
    "tools": check_calls,
    "logprobs": check_logprobs,
    "errors": check_errors,
    "batch": check_batch,
}


@pytest.mark.parametrize(
    ("client", "feature"),
    [
        pytest.param(client, feature, marks=pytest.mark.covers(client, feature))
        for client, features in COVERED.items()
        for feature in features
    ],
)
def test_a_program(client: str, feature: str, facts: Callable[[str], dict[str, Facts]]) -> None:
    """What a program told of a feature is what the server has to answer."""
    all_facts = facts(client)
    fact = all_facts[feature]
    if feature in CHECKS:
        CHECKS[feature](fact)
    elif feature == "structured output":
        served.City.model_validate(fact["object"])
    elif feature == "embeddings":
        assert fact["lengths"] == [576, 576]
    elif feature == "cancel":
        assert fact == {"running": True, "closed": True}
    elif feature == "responses":
        assert fact["text"].startswith(all_facts["chat"]["text"].strip())
        assert fact["second"]
    else:
        assert fact["text"] == all_facts["chat"]["text"] != ""
