"""Where the time of a request went, as a real stack of processes says it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from client import body_of
from reference import rows
from stack import Stack
from tests import clear_text
from tests.waiting import wait_for

from tandem.cli.inspect import explain
from tandem.protocol.errors import TandemError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LONG = 44
"""A prompt of about 600 tokens: seconds of prefill in chunks of 64."""
STOP_SECONDS = 2.0
TURNS = 3
ASK = {"x-tandem-timeline": "1"}


@pytest.fixture(scope="module")
def chunked(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pair whose prompts take several steps."""
    log = tmp_path_factory.mktemp("chunked") / "stack.log"
    flags = ["--max-num-batched-tokens", "64"]
    with Stack.running(str(smollm2), log, worker_flags=flags) as stack:
        yield stack


@pytest.fixture(scope="module")
def small_chunked(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    log = tmp_path_factory.mktemp("small-chunked") / "stack.log"
    flags = ["--max-num-batched-tokens", "64"]
    with Stack.running(str(small), log, worker_flags=flags) as stack:
        yield stack


def told(stack: Stack, request_id: str) -> dict[str, Any]:
    response = clear_text.get(f"{stack.url}/debug/requests/{request_id}", timeout=10)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def sum_of(content: dict[str, Any]) -> float:
    return float(sum(part["ms"] for part in content["parts"]))


def stood_still(content: dict[str, Any], role: str) -> float:
    """Milliseconds of the longest time in which the worker of a role is said to have stood still:
    a starved machine makes shorter ones."""
    names = ("stood still", "not taken yet")
    parts = content["parts"]
    found = [each["ms"] for each in parts if each["owner"] == role and each["name"] in names]
    return float(max(found, default=0.0))


def spread(content: dict[str, Any]) -> float:
    """Milliseconds of the router's own work on a stream and of its client's slowness, which are
    taken out of other parts: a starved router's are many."""
    names = ("text and events", "writing to it")
    return float(sum(part["ms"] for part in content["parts"] if part["name"] in names))


def noted_still(content: dict[str, Any], role: str, at: float) -> float:
    """Milliseconds that the worker of a role itself says it stood still around a moment: a starved
    one has stopped before it is, and goes on late. Notes that touch are one part of the call."""
    arrived = datetime.fromisoformat(content["started"]).timestamp()
    moment, notes = 1000 * (at - arrived), stops_of(content, role)
    begin, end = next((each for each in notes if each[0] <= moment <= each[1]), (0.0, 0.0))
    for start, stop in notes:
        if end and abs(start - end) < 1:
            end = stop
    for start, stop in reversed(notes):
        if end and abs(stop - begin) < 1:
            begin = start
    return end - begin


def stops_of(content: dict[str, Any], role: str) -> list[tuple[float, float]]:
    """When a role's worker says that it stood still, in milliseconds of the call."""
    legs = [leg for attempt in content["attempts"] for leg in attempt["legs"]]
    notes = [note for leg in legs if leg["role"] == role for note in leg["notes"] or ()]
    stops = [note for note in notes if note["name"] == "stopped"]
    return sorted((each["begin_ms"], each["begin_ms"] + each["ms"]) for each in stops)


def sent_and_taken(content: dict[str, Any], role: str) -> tuple[float, float]:
    """When the router sent a request to the worker of a role, and heard that it took it: a busy
    machine takes a while to either, by whose fault a stop is no shorter or longer."""
    legs = [leg for attempt in content["attempts"] for leg in attempt["legs"]]
    leg = next(each for each in legs if each["role"] == role)
    arrived = datetime.fromisoformat(content["started"]).timestamp()
    return arrived + leg["sent_ms"] / 1000, arrived + leg["accepted_ms"] / 1000


def test_a_whole_answer_brings_its_timeline_in_a_header(
    small_chunked: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    """The header's parts add up, by both workers; the kept record names them and their notes."""
    body = body_of(rows()[20].prompt, max_tokens=8)
    headers = {**ASK, "x-request-id": "whole-1"}
    response = clear_text.post(
        f"{small_chunked.url}/v1/completions", json=body, headers=headers, timeout=60
    )
    said = json.loads(response.headers["x-tandem-timeline"])
    assert said["request_id"] == "whole-1"
    assert abs(sum(part[3] for part in said["parts"]) - said["total_ms"]) < 1
    assert {part[0] for part in said["parts"]} >= {"router", "prefill", "decode"}
    content = told(small_chunked, "whole-1")
    assert abs(sum_of(content) - content["total_ms"]) < 1
    (attempt,) = content["attempts"]
    prefill, decode = attempt["legs"]
    assert {note["name"] for note in prefill["notes"]} >= {"queue", "chunk"}
    assert {note["name"] for note in decode["notes"]} >= {"load", "part", "commit", "decode"}
    assert {each["role"] for each in attempt["candidates"] if each["chosen"]} == {
        "prefill",
        "decode",
    }
    assert {"tokenize", "parse", "place"} <= {part["name"] for part in content["parts"]}
    assert clear_text.get(f"{small_chunked.url}/debug/requests/nobody").status_code == 404
    with pytest.raises(TandemError, match="no call 'nobody' is kept"):
        explain.run(["nobody", "--url", small_chunked.url])
    assert explain.run(["whole-1", "--url", small_chunked.url, "--width", "90"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  -> prefill ") and "requests" in line for line in lines)
    assert any(line.split()[:1] == ["part"] and line.endswith("GB/s") for line in lines)
    assert max(map(len, lines[:30])) < 140


def test_a_stream_brings_its_timeline_in_a_comment(small_chunked: Stack) -> None:
    """It comes before [DONE], and only to who asks."""
    body = body_of(rows()[21].prompt, max_tokens=8, stream=True)
    for headers, count in ((ASK, 1), ({}, 0)):
        text = clear_text.post(
            f"{small_chunked.url}/v1/completions", json=body, headers=headers, timeout=60
        ).text
        lines = [line for line in text.splitlines() if line]
        assert lines[-1] == "data: [DONE]"
        comments = [line for line in lines if line.startswith(": timeline ")]
        assert len(comments) == count
        if comments:
            assert lines[-2] == comments[0]
            said = json.loads(comments[0].removeprefix(": timeline "))
            assert abs(sum(part[3] for part in said["parts"]) - said["total_ms"]) < 1


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["before", "prefill", "decode"])
def test_who_was_stopped_is_named_with_the_time_it_took(
    chunked: Stack, moment: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker that stands still for two seconds is found in the parts of the request it held, and
    the other one in none of a second, but where a busy machine had no turn for it."""
    other = "prefill" if moment == "decode" else "decode"
    found: list[float] = []
    while len(found) < TURNS and min(found, default=1000.0) >= 1000:
        found.append(stood_still(stopped(chunked, moment, len(found), capsys), other))
    assert found[-1] < 1000, found


def stopped(
    chunked: Stack, moment: str, turn: int, capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """What the router keeps of a call whose worker was stopped, which is named."""
    role = "decode" if moment == "decode" else "prefill"
    new = {"before": 100, "prefill": 200, "decode": 300}  # no cached prefix
    name, request_id = f"{role}-0", f"stopped-{moment}-{turn}"

    async def run() -> tuple[float, float, float]:
        async with httpx.AsyncClient(base_url=chunked.url, timeout=120) as client:
            count = 32 if moment == "decode" else 8
            body = body_of(
                [new[moment] + turn, *rows()[LONG].prompt], stream=True, max_tokens=count
            )
            headers = {"x-request-id": request_id}
            if moment == "before":
                chunked.signal(name, signal.SIGSTOP)
            stopped_at = time.time()
            task = asyncio.create_task(client.post("/v1/completions", json=body, headers=headers))
            if moment != "before":
                await asyncio.to_thread(wait_for, lambda: begun(moment), 60)
                chunked.signal(name, signal.SIGSTOP)
                stopped_at = time.time()
            await asyncio.sleep(STOP_SECONDS)
            continued_at = time.time()
            chunked.signal(name, signal.SIGCONT)
            await asyncio.to_thread(chunked.metrics, name)
            runs_at = time.time()
            assert (await task).status_code == 200
            return stopped_at, continued_at, runs_at

    def begun(moment: str) -> bool:
        response = clear_text.get(f"{chunked.url}/debug/requests/{request_id}")
        if response.status_code != 200:
            return False
        if moment == "decode":
            return bool(response.json()["num_tokens"] >= 5)
        legs = [leg for attempt in response.json()["attempts"] for leg in attempt["legs"]]
        return any(each["role"] == role and each["accepted_ms"] is not None for each in legs)

    try:
        stopped_at, continued_at, runs_at = asyncio.run(run())
    finally:
        chunked.signal(name, signal.SIGCONT)
    content = told(chunked, request_id)
    assert abs(sum_of(content) - content["total_ms"]) < 1
    found = stood_still(content, role)
    sent_at, taken_at = sent_and_taken(content, role)
    begin, end = max(stopped_at, sent_at), max(runs_at, taken_at)
    least, most = 1000 * (continued_at - begin) - spread(content), 1000 * (end - begin)
    most = max(most, noted_still(content, role, (begin + continued_at) / 2))
    assert least - 100 < found < most + 100, json.dumps([least, most, content["parts"]])
    off = abs(sum_of(content) - content["total_ms"])
    explain.run([request_id, "--url", chunked.url])
    named = [line for line in capsys.readouterr().out.splitlines() if line.startswith("! ")]
    assert named[0].startswith(f"! {role} "), named
    told_of = f"{moment}: stopped {least:.0f} ms, told {found:.0f} ms"
    with capsys.disabled():
        print(f"\n{told_of}, sum of the parts off by {off:.3f} ms")
    return content
