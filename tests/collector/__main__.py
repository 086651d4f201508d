"""`make traces`: two requests as an OpenTelemetry collector wrote them down, drawn."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from tests.collector import draw, traces
from tests.collector.collector import Collector
from tests.waiting import wait_for

from tandem.hub import DEFAULT_MODEL, prepare

if TYPE_CHECKING:
    from stack import Stack

PAGE = Path("docs/traces.md")
PICTURES = Path("docs/screens")
FLAGS = ["--max-num-batched-tokens", "64"]
"""Prompts in chunks: one that can be hurt while it is computed."""
WORDS = "The quick brown fox jumps over the lazy dog, while it rains in Paris. "
RUNNING = "vllm:num_requests_running"
SENT_EVERY = "200"
"""Milliseconds after which a process sends its spans."""
WAIT_SECONDS, SETTLE_SECONDS = 60.0, 1.0
HEAD = """# Traces of two requests

Result of `make traces` on {day}. An OpenTelemetry collector received the spans of a router, two
prefill workers and a decode worker. Bars of `x`, red in the pictures, are failures. The
spans of a killed worker are lost. All spans are listed in [tracing.md](tracing.md#traces).
"""
PAIR = "A disaggregated request"
FAILED = "The same, with the prefill worker killed during the prompt"


def main() -> int:
    """Draw both; 1 where a trace is not whole."""
    parser = argparse.ArgumentParser(prog="python -m tests.collector", description=__doc__)
    parser.add_argument("--page", type=Path, default=PAGE, help="page to write")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="folder of the pictures")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # the stack
    from stack import Stack

    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = SENT_EVERY
    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    with tempfile.TemporaryDirectory() as name, Collector.running(Path(name)) as collector:
        traced = ["--otlp-traces-endpoint", collector.grpc_url]
        running = Stack.running(
            model,
            Path(name) / "stack.log",
            prefill=2,
            worker_flags=[*traced, *FLAGS],
            router_flags=traced,
        )
        with running as stack:
            pair = whole(stack, collector)
            failed = failed_over(stack, collector)
    found = {PAIR: ("trace-pair.svg", pair), FAILED: ("trace-failed-over.svg", failed)}
    problems = [*traces.faults(pair, traces.PARENTS), *lost(failed)]
    write(options.page, options.pictures, found)
    for each in problems:
        print(f"fault: {each}")
    return int(bool(problems))


def whole(stack: Stack, collector: Collector) -> list[traces.Span]:
    """The spans of a request that both workers served."""
    ask(stack, "pair", 20)  # links and caches are warm then
    return settled(collector, ask(stack, "pair-2", 24))


def failed_over(stack: Stack, collector: Collector) -> list[traces.Span]:
    """The spans of one whose prefill worker was killed."""
    stack.killed = frozenset({"prefill-0", "prefill-1"})  # either may have to go

    def kill() -> None:
        wait_for(lambda: bool(computing(stack)), WAIT_SECONDS, every=0.05)
        stack.signal(computing(stack), signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    trace = ask(stack, "hurt", 40)
    killer.join(WAIT_SECONDS)
    return settled(collector, trace)


def computing(stack: Stack) -> str:
    """The prefill worker that has a request; empty while none has."""
    names = ("prefill-0", "prefill-1")
    return next((each for each in names if stack.total(each, RUNNING)), "")


def ask(stack: Stack, request_id: str, repeats: int) -> str:
    """A completion, streamed; the id of its trace."""
    body = {"prompt": f"{request_id}: {WORDS * repeats}", "max_tokens": 12, "temperature": 0}
    headers = {"x-request-id": request_id}
    call = {**body, "stream": True, "ignore_eos": True}
    answer = httpx.post(f"{stack.url}/v1/completions", json=call, headers=headers, timeout=120)
    answer.raise_for_status()
    told = httpx.get(f"{stack.url}/debug/requests/{request_id}", timeout=10).json()
    return str(told["trace_id"])


def settled(collector: Collector, trace: str) -> list[traces.Span]:
    """The spans of a trace, when its last ones have come."""

    def names() -> set[str]:
        return {each.name for each in traces.of(traces.read(collector.file), trace)}

    wanted = {"text_completion", "stream", "decode", "tokens"}
    wait_for(lambda: wanted <= names(), WAIT_SECONDS, seen=lambda: sorted(names()))
    time.sleep(SETTLE_SECONDS)
    return traces.of(traces.read(collector.file), trace)


def lost(spans: list[traces.Span]) -> list[str]:
    """Why the trace of a request that failed over is not whole: a killed worker's spans are lost,
    the attempt that it failed is there, and so is all of the next one."""
    attempts = [each for each in spans if each.name == "attempt"]
    if [bool(each.error) for each in attempts] != [True, False]:
        return [f"attempts: {', '.join(each.error or 'well' for each in attempts)}"]
    return traces.faults(spans, traces.PARENTS)


def write(page: Path, pictures: Path, found: dict[str, tuple[str, list[traces.Span]]]) -> None:
    """The page with both traces as text, and their pictures."""
    day = datetime.now(UTC).date().isoformat()
    parts = [HEAD.format(day=day)]
    for title, (name, spans) in found.items():
        (pictures / name).write_text(draw.picture(spans, title))
        parts.append(f"## {title}\n\n![{title}](screens/{name})\n\n```\n{draw.text(spans)}```\n")
    page.write_text("\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
