"""llm, the command line, as its users tell it of a server: by a file of models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "llm")
MODELS = """
- model_id: smol
  model_name: {model}
  api_base: {base}
  api_key_name: tandem
  supports_schema: true
- model_id: smol-responses
  model_name: {model}
  api_base: {base}
  api_key_name: tandem
  responses: true
- model_id: nobody
  model_name: nobody
  api_base: {base}
  api_key_name: tandem
"""
SECONDS = 90.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = MODELS.format(model=served.MODEL, base=served.BASE)
    (tmp_path / "extra-openai-models.yaml").write_text(text)
    (tmp_path / "keys.json").write_text(json.dumps({"tandem": served.KEY}))
    return tmp_path


def command(folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    program = str(Path(sys.executable).parent / "llm")
    return [program, *words], {**os.environ, "LLM_USER_PATH": str(folder)}


def run(folder: Path, *words: str) -> Any:
    line, env = command(folder, *words)
    return subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=-3
    )


def ask(folder: Path, *words: str) -> str:
    done = run(folder, "-o", "temperature", "0", "-o", "max_tokens", "16", *words)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@covers("chat", "stream", "usage", "responses")
def test_prompts_whole_and_streamed(folder: Path) -> None:
    """Streamed (its default), whole, and by the other endpoint the same words come."""
    streamed = ask(folder, "-m", "smol", served.QUESTION)
    done = run(
        folder,
        *("-m", "smol", "--no-stream", "--usage", "-o", "temperature", "0"),
        *("-o", "max_tokens", "16", served.QUESTION),
    )

    assert done.stdout == streamed
    assert streamed.strip()
    assert f"{served.prompt_tokens()} input" in done.stderr
    assert ask(folder, "-m", "smol-responses", served.QUESTION).split()


@covers("structured output")
def test_an_answer_follows_a_schema(folder: Path) -> None:
    schema = json.dumps(served.City.model_json_schema())
    words = ("-m", "smol", "--schema", schema, "-o", "max_tokens", "200", served.QUESTION)
    done = run(folder, *words)

    assert done.returncode == 0, done.stderr
    served.City.model_validate_json(done.stdout)


@covers("errors")
def test_errors(folder: Path) -> None:
    """The program ends with the server's words."""
    cases: Any = (
        ("nobody", "nobody", []),
        ("maximum context length", "smol", ["-o", "max_tokens", "100000"]),
        ("401", "smol", ["--key", "wrong"]),
    )
    for words, model, more in cases:
        done = run(folder, "-m", model, *more, "Hi")
        assert done.returncode == 1
        assert words in done.stderr


@covers("cancel")
def test_an_interrupted_program_is_cancelled(folder: Path) -> None:
    """Ctrl-C, and workers hold nothing soon after."""
    words = ("-m", "smol", "-o", "max_tokens", str(served.LONG), "Write a very long story.")
    line, env = command(folder, *words)
    with subprocess.Popen(line, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.read(1)
        assert served.running() > 0
        child.send_signal(signal.SIGINT)
        child.wait(SECONDS)

    assert served.becomes(False)
