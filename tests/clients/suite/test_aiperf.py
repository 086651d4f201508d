"""aiperf, in an environment of its own: loads by its command line, judged by what it wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "aiperf")
PROGRAM = str(Path(sys.executable).parent / "aiperf")
MODEL = os.environ["TANDEM_CLIENTS_MODEL"]
SECONDS = 200.0
PROMPT = 32
TOKENS = 16
FEW = 6
"""No answer to its prompts ends sooner by itself."""
MEASURED = ("--streaming", "--use-server-token-count", "--osl-stddev", "0", "--osl")
WHOLE: dict[str, Any] = {"min_tokens": TOKENS, "temperature": 0}
"""Every token has a text: an end that is ignored has none, and is no chunk to it."""
pytestmark = pytest.mark.timeout(300)


@contextmanager
def started(
    out: Path, endpoint: str, *more: str, key: str = served.KEY, model: str = served.MODEL
) -> Iterator[subprocess.Popen[str]]:
    """A run of prompts of a fixed length, made with the model's own tokenizer.

    Nothing listens where it would look for models: its switch to be offline has version 0.13 take
    a folder for the name of a repository.
    """
    line = [PROGRAM, "profile", "-m", model, "-u", served.URL, "--api-key", key]
    line += ["--endpoint-type", endpoint, "--tokenizer", MODEL, "--random-seed", "1"]
    line += ["--isl", str(PROMPT), "--isl-stddev", "0", "--output-artifact-dir", str(out)]
    line += ["--ui", "none", "--no-gpu-telemetry", "--workers-max", "2", *more]
    with tempfile.TemporaryDirectory() as folder:  # short: names of sockets are made with it
        home = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": f"{folder}/hub", "TMPDIR": folder}
        log = out.with_suffix(".log")
        with (
            log.open("w") as said,
            subprocess.Popen(
                line, env={**os.environ, **home}, stdout=said, stderr=said, text=True
            ) as child,
        ):
            try:
                yield child
            finally:
                child.kill()


def records(out: Path) -> list[Any]:
    lines = (out / "profile_export.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def load(out: Path, endpoint: str, *more: str) -> list[dict[str, Any]]:
    """The values of each request of a run in which none failed."""
    with started(out, endpoint, *more) as child:
        code = child.wait(SECONDS)
    assert code == 0, out.with_suffix(".log").read_text()[-4000:]
    found = records(out)
    assert [each["error"] for each in found if each.get("error")] == []
    return [{name: it["value"] for name, it in each["metrics"].items()} for each in found]


def prompts(out: Path) -> list[Any]:
    data = json.loads((out / "inputs.json").read_text())["data"]
    return [payload for session in data for payload in session["payloads"]]


def has_all_tokens(values: dict[str, Any], tokens: int = TOKENS) -> None:
    """As many tokens as asked for, by usage as well, each in a chunk of its own."""
    assert values["usage_completion_tokens"] == values["output_sequence_length"] == tokens
    assert values["usage_prompt_tokens"] == values["input_sequence_length"]
    assert values["inter_token_latency"] > 0
    has_chunks(values, tokens)


def has_chunks(values: dict[str, Any], count: int) -> None:
    """So many of them, the first one's time known."""
    assert 0 < values["time_to_first_token"] < values["request_latency"]
    assert len(values["inter_chunk_latency"]) == count - 1


def total(series: list[Any], url: str, **labels: str) -> float:
    """By how much a counter of one place grew while the load ran."""
    return sum(
        float(each["stats"]["total"])
        for each in series
        if each["endpoint_url"].startswith(url) and labels.items() <= each["labels"].items()
    )


@covers("chat", "stream", "usage", "batch")
def test_chats_at_a_fixed_concurrency(tmp_path: Path) -> None:
    """Its counts of tokens are the server's, in answers and in what it scrapes of all processes."""
    out = tmp_path / "out"
    found = load(
        out,
        *("chat", "--concurrency", "4", "--request-count", str(served.MANY), *MEASURED),
        *(str(TOKENS), "--extra-inputs", json.dumps(WHOLE)),
        *("--per-chunk-usage", "--wait-for-model-timeout", "30", "--wait-for-model-mode", "models"),
        *("--server-metrics", *served.WORKERS),
    )
    summary = json.loads((out / "profile_export_aiperf.json").read_text())
    scraped = json.loads((out / "server_metrics_export.json").read_text())

    assert len(found) == summary["request_count"]["avg"] == served.MANY
    for values in found:
        has_all_tokens(values)
    wanted = sorted(served.prompt_tokens(each["messages"]) for each in prompts(out))
    assert sorted(values["usage_prompt_tokens"] for values in found) == wanted
    assert summary["total_usage_completion_tokens"]["avg"] == served.MANY * TOKENS

    places = {f"{served.URL}/metrics", *served.WORKERS}
    assert set(scraped["summary"]["endpoints_successful"]) == places
    tokens = scraped["metrics"]["vllm:generation_tokens"]["series"]
    assert total(tokens, served.URL) == served.MANY * TOKENS
    assert sum(total(tokens, each) for each in served.WORKERS) >= served.MANY * TOKENS
    ended = scraped["metrics"]["vllm:request_success"]["series"]
    assert total(ended, served.URL, finished_reason="length") == served.MANY
    first = scraped["metrics"]["vllm:time_to_first_token_seconds"]["series"]
    assert [each["stats"]["count"] for each in first if served.URL in each["endpoint_url"]] == [
        served.MANY
    ]


@covers("stream", "usage")
def test_completions_at_a_rate(tmp_path: Path) -> None:
    """Prompts are as long as asked, by its tokenizer and by the server's."""
    rate = ("--request-rate", "4", "--arrival-pattern", "constant", "--request-count", "6")
    more = (*MEASURED, str(TOKENS), "--extra-inputs", json.dumps(WHOLE), "--no-server-metrics")
    found = load(tmp_path / "out", "completions", *rate, *more)

    assert len(found) == 6
    for values in found:
        has_all_tokens(values)
        assert values["usage_prompt_tokens"] == PROMPT


@covers("usage")
def test_its_own_count(tmp_path: Path) -> None:
    """Without the server's counts it tokenizes what was said; prompts come out the same."""
    usage = {**WHOLE, "stream_options": {"include_usage": True}}
    rate = ("--request-rate", "4", "--request-count", "4", "--streaming", "--osl", str(TOKENS))
    more = ("--extra-inputs", json.dumps(usage), "--no-server-metrics")
    found = load(tmp_path / "out", "completions", *rate, *more)

    assert len(found) == 4
    for values in found:
        assert values["usage_completion_tokens"] == TOKENS
        assert 0 < values["output_sequence_length"] <= TOKENS  # texts may be said in fewer
        assert values["usage_prompt_tokens"] == values["input_sequence_length"] == PROMPT


def small(out: Path, endpoint: str) -> list[dict[str, Any]]:
    """A short load of an endpoint that streams."""
    more = ("--concurrency", "2", "--request-count", "4", *MEASURED, str(FEW))
    found = load(out, endpoint, *more, "--extra-inputs", "temperature:0", "--no-server-metrics")

    assert len(found) == 4
    return found


@covers("responses", "stream")
def test_responses(tmp_path: Path) -> None:
    """OpenAI's Responses, of which it asks usage as of chats, and reads none."""
    for values in small(tmp_path / "out", "responses"):
        has_chunks(values, FEW + 1)  # the text's end is one to it as well


@covers("messages", "stream", "usage")
def test_messages(tmp_path: Path) -> None:
    for values in small(tmp_path / "out", "messages"):
        has_all_tokens(values, FEW)


@covers("embeddings")
def test_embeddings(tmp_path: Path) -> None:
    """Three texts in each request, a vector for each."""
    out = tmp_path / "out"
    more = ("--batch-size", "3", "--concurrency", "2", "--request-count", "4", "--export-level")
    found = load(out, "embeddings", *more, "raw", "--no-server-metrics")
    raw = (out / "profile_export_raw.jsonl").read_text().splitlines()

    assert len(found) == len(raw) == 4
    for line in raw:
        (answer,) = json.loads(line)["responses"]
        body = json.loads(answer["text"])
        assert [len(each["embedding"]) for each in body["data"]] == [576] * 3


@covers("errors")
@pytest.mark.parametrize(
    ("more", "key", "model", "code", "words"),
    [
        ((), "wrong", served.MODEL, 401, "API key"),
        ((), served.KEY, "nobody", 404, "nobody"),
        (("--osl", "100000"), served.KEY, served.MODEL, 400, "maximum context length"),
    ],
)
def test_errors(
    tmp_path: Path, more: tuple[str, ...], key: str, model: str, code: int, words: str
) -> None:
    """Each request is told as failed, with the server's status and words."""
    out = tmp_path / "out"
    more = ("--concurrency", "1", "--request-count", "2", "--no-server-metrics", *more)
    with started(out, "chat", *more, key=key, model=model) as child:
        assert child.wait(SECONDS) == 1

    found = [each["error"] for each in records(out)]
    assert [each["code"] for each in found] == [code] * 2
    assert all(words in each["message"] for each in found)


@covers("cancel")
def test_requests_that_it_cancels(tmp_path: Path) -> None:
    """It leaves each stream after half a second, and workers hold nothing soon after."""
    out = tmp_path / "out"
    more: tuple[str, ...] = ("--concurrency", "2", "--request-count", "4", "--streaming")
    more += ("--no-server-metrics",)
    more += ("--osl", str(served.LONG), "--extra-inputs", "ignore_eos:true")
    more += ("--request-cancellation-rate", "100", "--request-cancellation-delay", "0.5")
    with started(out, "chat", *more) as child:
        assert served.becomes(True, SECONDS)
        child.wait(SECONDS)

    assert [each["metadata"]["was_cancelled"] for each in records(out)] == [True] * 4
    assert served.becomes(False)
