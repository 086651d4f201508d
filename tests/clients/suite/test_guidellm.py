"""guidellm, in an environment of its own: benchmarks by its command line, judged by its report."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.clients.suite import served

covers = partial(pytest.mark.covers, "guidellm")
PROGRAM = str(Path(sys.executable).parent / "guidellm")
MODEL = os.environ["TANDEM_CLIENTS_MODEL"]
SECONDS = 280.0
PROMPT = 32
TOKENS = 6
"""No answer to its chats ends sooner by itself."""
EACH = 6
"""Requests of one benchmark."""
WHOLE: dict[str, Any] = {"min_tokens": TOKENS, "ignore_eos": False, "temperature": 0}
"""Every token has a text: an end, which it has ignored otherwise, would be no chunk to it."""
pytestmark = pytest.mark.timeout(300)


def run(out: Path, profile: str, body: dict[str, Any] | None = None, **backend: str) -> Any:
    """One run to its end: no model is named, and the tokenizer is a folder.

    ``body`` is what each request says besides.
    """
    place = {"kind": "openai_http", "target": served.URL, "api_key": served.KEY, **backend}
    line = [PROGRAM, "run", "--backend", json.dumps({**place, "extras": {"body": body or {}}})]
    line += ["--tokenizer", f"kind=huggingface_auto,model={MODEL}"]
    line += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={TOKENS}"]
    line += ["--profile", profile, "--constraint", f"kind=max_requests,count={EACH}"]
    line += ["--output", f"kind=json,path={out}", "--disable-console"]
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent / "hub")}
    env = {**os.environ, **home, "GUIDELLM__MAX_WORKER_PROCESSES": "2"}
    return subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def benchmarks(out: Path, profile: str, **more: Any) -> list[Any]:
    """What a run without a failed request reports, a benchmark for each strategy."""
    done = run(out, profile, **more)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    found = json.loads(out.read_text())["benchmarks"]
    for each in found:
        requests = each["requests"]
        assert len(requests["successful"]) == EACH
        assert requests["errored"] == requests["incomplete"] == []
    return list(found)


def bodies(benchmark: Any) -> list[Any]:
    return [
        json.loads(each["request_args"])["body"] for each in benchmark["requests"]["successful"]
    ]


def have_all_tokens(benchmark: Any) -> None:
    """As many tokens as asked for in each answer, each in a chunk of its own."""
    for each in benchmark["requests"]["successful"]:
        assert each["output_tokens"] == TOKENS
        assert each["info"]["timings"]["token_iterations"] == TOKENS
        assert each["time_to_first_token_ms"] > 0
        assert each["inter_token_latency_ms"] > 0
        assert each["total_tokens"] == each["prompt_tokens"] + TOKENS
    totals = benchmark["metrics"]["output_token_count"]["successful"]
    assert totals["total_sum"] == EACH * TOKENS


def answered(handler: str) -> float:
    """How often the router answered a path well, by its metrics."""
    with urllib.request.urlopen(f"{served.URL}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(
        rf'^http_requests_total{{handler="{handler}",status="200"}} (\S+)$', text, re.M
    )
    return sum(map(float, found))


@covers("chat", "stream", "usage", "batch")
def test_chats_one_by_one_and_at_once(tmp_path: Path) -> None:
    """It asks for health and the model's name itself; prompts are as long as the server says."""
    before = [answered(each) for each in ("/health", "/v1/models")]
    profile = json.dumps({"kind": "concurrent", "streams": [1, 4]})
    found = benchmarks(tmp_path / "out.json", profile, body=WHOLE)

    assert all(
        answered(each) > was for each, was in zip(("/health", "/v1/models"), before, strict=True)
    )
    assert [each["config"]["strategy"]["streams"] for each in found] == [1, 4]
    for each in found:
        have_all_tokens(each)
        assert {sent["model"] for sent in bodies(each)} == {served.MODEL}
        wanted = [served.prompt_tokens(sent["messages"]) for sent in bodies(each)]
        assert [one["prompt_tokens"] for one in each["requests"]["successful"]] == wanted


@covers("stream", "usage")
def test_completions_in_a_sweep(tmp_path: Path) -> None:
    """One by one, all at once, and at a rate between: each prompt is as long as was asked for."""
    found = benchmarks(
        tmp_path / "out.json",
        "kind=sweep,sweep_size=3",
        body=WHOLE,
        request_format="/v1/completions",
    )

    kinds = [each["config"]["strategy"]["type_"] for each in found]
    assert kinds == ["synchronous", "throughput", "constant"]
    for each in found:
        have_all_tokens(each)
        assert {one["prompt_tokens"] for one in each["requests"]["successful"]} == {PROMPT}


@covers("responses", "stream", "usage")
def test_responses_at_a_rate(tmp_path: Path) -> None:
    """Events of Responses bring it the same."""
    (found,) = benchmarks(
        tmp_path / "out.json",
        "kind=constant,rate=4",
        body={"temperature": 0},
        request_format="/v1/responses",
    )

    have_all_tokens(found)


@covers("embeddings", "usage")
def test_embeddings(tmp_path: Path) -> None:
    (found,) = benchmarks(
        tmp_path / "out.json", "kind=concurrent,streams=2", request_format="/v1/embeddings"
    )

    assert {one["prompt_tokens"] for one in found["requests"]["successful"]} == {PROMPT}


def test_what_it_says_of_errors(tmp_path: Path) -> None:
    """A wrong key ends the run, an unknown model each request: it tells the status, never words."""
    profile = "kind=synchronous"
    refused = run(tmp_path / "key.json", profile, api_key="wrong")
    unknown = run(tmp_path / "model.json", profile, model="nobody")
    (found,) = json.loads((tmp_path / "model.json").read_text())["benchmarks"]

    assert refused.returncode == 1
    assert "401 Unauthorized" in refused.stderr
    assert unknown.returncode == 0
    assert found["requests"]["successful"] == []
    errors = [each["info"]["error"] for each in found["requests"]["errored"]]
    assert len(errors) == EACH
    assert all("404 Not Found" in each for each in errors)
