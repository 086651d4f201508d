"""Structured output by outlines, with prefill and decode workers that were told so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from stack import Stack
from tests import clear_text

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(300)]

SLOW = "(a|b)*a(a|b){40}"
"""2^40 states."""


@pytest.fixture(scope="module")
def stack(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One of each."""
    flags = ["--structured-outputs-backend", "outlines"]
    log = tmp_path_factory.mktemp("outlines") / "stack.log"
    with Stack.running(str(smollm2), log, worker_flags=flags) as stack:
        yield stack


def ask(stack: Stack, wanted: dict[str, Any]) -> httpx.Response:
    """A completion under a grammar."""
    body = {"prompt": "My number is ", "max_tokens": 60, "structured_outputs": wanted}
    return clear_text.post(f"{stack.url}/v1/completions", json=body, timeout=120)


def test_answers_match(stack: Stack) -> None:
    """By expression, by choice and by schema."""
    answer = ask(stack, {"regex": r"\d{3}-\d{4}"})
    assert answer.status_code == 200, answer.text
    assert re.fullmatch(r"\d{3}-\d{4}", answer.json()["choices"][0]["text"])
    choice = ask(stack, {"choice": ["Rome", "Oslo"]}).json()["choices"][0]["text"]
    assert choice in ("Rome", "Oslo")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    text = ask(stack, {"json": schema}).json()["choices"][0]["text"]
    assert isinstance(json.loads(text)["ok"], bool)


@pytest.mark.parametrize(
    ("wanted", "param", "words"),
    [
        ({"grammar": "start: /a/"}, "structured_outputs.grammar", "guidance alone"),
        ({"json": {"minimum": 3}}, "structured_outputs.json", "minimum at /"),
    ],
)
def test_what_outlines_does_not_follow_is_named(
    stack: Stack, wanted: dict[str, Any], param: str, words: str
) -> None:
    """400, with the field that the client wrote."""
    answer = ask(stack, wanted)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


def test_a_text_that_compiles_for_ever_holds_up_nobody(stack: Stack) -> None:
    """It is 400 in the end; those beside it are answered meanwhile."""
    with ThreadPoolExecutor(1) as threads:
        slow = threads.submit(ask, stack, {"regex": SLOW})
        for sign in "xyz":
            answer = ask(stack, {"regex": f"{sign}{{3}}"})
            assert answer.json()["choices"][0]["text"] == sign * 3
        refused = slow.result(120)
    assert refused.status_code == 400, refused.text
    assert "compiles within" in refused.json()["error"]["message"]
