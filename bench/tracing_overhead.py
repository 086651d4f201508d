"""What traces cost the router: tokens a second and CPU per token at several shares of traced calls.

The replaying worker, the router and a receiver of spans (gRPC, in this process's child) run side by
side for each share; rounds of the shares take turns, so that all see the same machine. A worker
makes a step as soon as it can, so that the router is what bounds the rate.

    .venv/bin/python bench/tracing_overhead.py --streams 64 --tokens 200 --rounds 5
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs
from router_overhead import TEXT, cpu_seconds, one_round, replay, wait_ready

from tandem.cli.ports import free_ports
from tandem.hub import DEFAULT_MODEL, prepare

VARIANTS = ("no timelines", "off", "1 %", "100 %")
"""Without records at all; records and no spans (the default); a share of calls traced."""
_RATIOS = {"1 %": 0.01, "100 %": 1.0}


def receive(port: int, count: Synchronized[int]) -> None:
    """Takes spans and counts them."""

    class Servicer(stubs.TraceServiceServicer):
        def Export(self, request: Any, _context: Any) -> Any:
            scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
            with count.get_lock():
                count.value += sum(len(scope.spans) for scope in scopes)
            return service.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    stubs.add_TraceServiceServicer_to_server(Servicer(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


def route(port: int, worker_port: int, model: str, variant: str, collector: int) -> None:
    """The router, as ``tandem router`` runs it."""
    from tandem.router.app import serve
    from tandem.router.config import RouterConfig

    ratio = _RATIOS.get(variant)
    config = RouterConfig(
        port=port,
        workers=(f"127.0.0.1:{worker_port}",),
        model=model,
        timeline_requests=0 if variant == "no timelines" else 1000,
        otlp_traces_endpoint=None if ratio is None else f"http://127.0.0.1:{collector}",
        traces_sample_ratio=ratio if ratio is not None else 0.0,
    )
    serve(config, log_level="warning")


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval-ms", type=float, default=1.0)
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args)
    for variant, each in found.items():
        print(
            f"{variant:<12} {each['tokens_per_s']:8.0f} tokens/s ({each['rate_ratio']:.3f} of off,"
            f" quartiles {each['rate_ratio_low']:.3f} to {each['rate_ratio_high']:.3f}), "
            f"{each['cpu_us_per_token']:6.1f} us of CPU a token ({each['cpu_ratio']:.3f}), "
            f"{each['spans']:.0f} spans"
        )
    if args.out is not None:
        said = {name: value for name, value in vars(args).items() if name != "out"}
        args.out.write_text(json.dumps({"options": said, "variants": found}, indent=1) + "\n")


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by variant."""
    from tandem.text.tokenizer import Tokenizer

    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    token_ids = Tokenizer.load(model).encode(TEXT)
    spawn = multiprocessing.get_context("spawn")
    interval = args.interval_ms / 1000
    children, routers = [], {}
    counts: dict[str, Any] = {}
    for variant in VARIANTS:
        worker_port, port, collector = free_ports(3)
        counts[variant] = spawn.Value("q", 0)
        children += [
            spawn.Process(target=receive, args=(collector, counts[variant])),
            spawn.Process(target=replay, args=(worker_port, token_ids, interval)),
        ]
        router = spawn.Process(target=route, args=(port, worker_port, model, variant, collector))
        routers[variant] = (port, router)
        children.append(router)
    for child in children:
        child.start()
    samples: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    try:
        for port, _ in routers.values():
            asyncio.run(wait_ready(port))
            asyncio.run(one_round(port, 0, args, args.endpoint))  # warm
        for number in range(args.rounds):
            turn = VARIANTS if number % 2 else VARIANTS[::-1]
            for variant in turn:
                port, router = routers[variant]
                samples[variant].append(_round(port, router.pid, args))
        time.sleep(6.0)  # the SDK sends what is left
        return {
            variant: {**_medians(each, samples["off"]), "spans": float(counts[variant].value)}
            for variant, each in samples.items()
        }
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.join(10)


def _medians(each: list[tuple[float, float]], off: list[tuple[float, float]]) -> dict[str, float]:
    """Of rates and costs, and of their ratios to the round of "off" beside each."""
    pairs = list(zip(each, off, strict=True))
    rates = [mine[0] / other[0] for mine, other in pairs]
    low, middle, high = statistics.quantiles(rates, n=4)
    return {
        "tokens_per_s": statistics.median(rate for rate, _ in each),
        "cpu_us_per_token": statistics.median(cost for _, cost in each),
        "rate_ratio": middle,
        "rate_ratio_low": low,
        "rate_ratio_high": high,
        "cpu_ratio": statistics.median(mine[1] / other[1] for mine, other in pairs),
    }


def _round(port: int, pid: int | None, args: argparse.Namespace) -> tuple[float, float]:
    """Tokens a second, and microseconds of the router's CPU a token."""
    measured = psutil.Process(pid)
    before, began = cpu_seconds(measured), time.monotonic()
    asyncio.run(one_round(port, 0, args, args.endpoint))
    seconds, spent = time.monotonic() - began, cpu_seconds(measured) - before
    tokens = args.streams * args.tokens
    return tokens / seconds, 1e6 * spent / tokens


if __name__ == "__main__":
    main()
