"""One request is one trace: router, prefill worker, hand-off and decode worker."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client import body_of
from conftest import StackMaker
from otlp_receiver import Receiver
from reference import rows
from stack import Stack
from tests import clear_text
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = "b7ad6b7169203331"
LONG = 44


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.close()


def flags(url: str) -> list[str]:
    """Tracing on, for any process; exported at once where the environment says so."""
    return ["--otlp-traces-endpoint", url]


def ask(stack: Stack, traceparent: str, prompt: list[int]) -> httpx.Response:
    headers = {"traceparent": traceparent} if traceparent else {}
    body = body_of(prompt, max_tokens=8)
    return clear_text.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120)


def trace_of(receiver: Receiver, trace_id: str, wanted: set[str]) -> list[dict[str, Any]]:
    """All spans of a trace, when those of these names have come."""
    wait_for(
        lambda: wanted <= {each["name"] for each in receiver.of(trace_id)},
        30,
        seen=lambda: sorted(each["name"] for each in receiver.of(trace_id)),
    )
    return receiver.of(trace_id)


def check_parents(spans: list[dict[str, Any]]) -> dict[str, str]:
    """Every span's parent is in the trace, but the caller's own; parents' names by names."""
    names = {each["id"]: each["name"] for each in spans} | {CALLER: "caller"}
    assert all(each["parent"] in names for each in spans), spans
    return {each["name"]: names[each["parent"]] for each in spans}


def attempts_of(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = (span for span in spans if span["name"] == "attempt")
    return sorted(found, key=lambda span: span["begin"])


def is_whole(spans: list[dict[str, Any]]) -> bool:
    """Whether all that two attempts leave has come, each part by its own process."""
    attempts, known = attempts_of(spans), {CALLER} | {span["id"] for span in spans}
    return (
        len(attempts) == 2
        and any(span["parent"] == attempts[1]["id"] for span in spans)
        and all(span["parent"] in known for span in spans)
    )


def check_times(spans: list[dict[str, Any]]) -> None:
    """Nothing begins before its parent, or ends before it begins; all is on one machine here."""
    known = {each["id"]: each for each in spans}
    for each in spans:
        assert each["end"] >= each["begin"], each
        parent = known.get(each["parent"])
        assert parent is None or each["begin"] >= parent["begin"] - 0.005, (each, parent)


@pytest.mark.parametrize(
    "protocol", [pytest.param("grpc", marks=pytest.mark.nightly), "http/protobuf"]
)
def test_a_request_of_a_pair_is_one_whole_trace(
    start_small: StackMaker, receiver: Receiver, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parents are right, GenAI's names are there, a caller's choice is followed both ways."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    url = receiver.grpc_url if protocol == "grpc" else receiver.http_url
    each = flags(url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with start_small(worker_flags=each, router_flags=each) as stack:
        unwanted = ask(stack, f"00-{'1' * 32}-{CALLER}-00", rows()[20].prompt)
        untraced = ask(stack, "", rows()[22].prompt)
        response = ask(stack, f"00-{TRACE}-{CALLER}-01", rows()[21].prompt)
        assert {unwanted.status_code, untraced.status_code, response.status_code} == {200}
        wanted = {"text_completion", "attempt", "prefill", "decode", "hand-off", "chunk", "load"}
        spans = trace_of(receiver, TRACE, wanted | {"stream", "tokenize", "place"})
    parents = check_parents(spans)
    check_times(spans)
    assert parents["text_completion"] == "caller"
    assert parents["attempt"] == parents["tokenize"] == parents["stream"] == "text_completion"
    assert parents["prefill"] == "attempt"
    assert parents["chunk"] == parents["queue"] == "prefill"
    assert (parents["hand-off"], parents["load"]) == ("decode", "hand-off")
    by_name = {span["name"]: span for span in spans}
    assert by_name["prefill"]["service"] == "tandem-prefill"
    assert by_name["hand-off"]["service"] == "tandem-decode"
    assert "part" in by_name["hand-off"]["events"]
    root = by_name["text_completion"]["attributes"]
    assert root["gen_ai.operation.name"] == "text_completion"
    assert (root["gen_ai.provider.name"], root["gen_ai.request.model"]) == ("tandem", "smol")
    assert root["gen_ai.usage.input_tokens"] == len(rows()[21].prompt)
    assert root["gen_ai.usage.output_tokens"] == root["gen_ai.request.max_tokens"] == 8
    assert root["gen_ai.response.finish_reasons"] == ["length"]
    assert {span["trace"] for span in receiver.spans} == {TRACE}


@pytest.mark.nightly
def test_a_request_that_failed_over_is_one_trace(
    start_stack: StackMaker, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By grpc: the attempt whose prefill worker was killed is there as failed, beside the one that
    went through; the trace is whole though the killed worker's own spans are lost."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    each = flags(receiver.grpc_url)
    chunks = ["--max-num-batched-tokens", "64"]
    with start_stack(worker_flags=[*each, *chunks], router_flags=each) as stack:
        stack.killed = frozenset({"prefill-0"})

        def kill() -> None:
            stack.signal(stack.holder("prefill"), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        response = ask(stack, f"00-{TRACE}-{CALLER}-01", rows()[LONG].prompt)
        killer.join()
        assert response.status_code == 200
        trace_of(receiver, TRACE, {"text_completion", "attempt", "decode", "stream"})
        wait_for(lambda: is_whole(receiver.of(TRACE)), 30, seen=lambda: receiver.of(TRACE))
        spans = receiver.of(TRACE)
    check_parents(spans)
    attempts = attempts_of(spans)
    assert [span["error"] for span in attempts] == [True, False]
    assert ["first token" in span["events"] for span in attempts] == [False, True]
    assert "prefill" in attempts[0]["attributes"]["tandem.prefill"]
    (decode,) = (span for span in spans if span["parent"] == attempts[1]["id"])
    assert (decode["service"], decode["name"]) == ("tandem-decode", "decode")
