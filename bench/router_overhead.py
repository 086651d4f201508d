"""CPU time that the router spends per streamed token, from frame received to bytes written.

A worker process replays frames (one per step, one token per stream in each), the real router runs
under uvicorn in a process of its own, this process reads the streams. Only the router's CPU time
(user and system, all its threads) is counted, between the first and the last token of a round.
Several endpoints take turns in one run, round by round, so that what the machine does else meets
all of them.

    .venv/bin/python bench/router_overhead.py --streams 16 --tokens 400 --interval-ms 20
    .venv/bin/python bench/router_overhead.py --streams 64 --tokens 200 --rounds 5 \
        --endpoint completions --endpoint grpc --endpoint grpc-shared
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import zmq

from tandem.cli.serve.listening import free_ports
from tandem.hub import DEFAULT_MODEL, prepare
from tandem.link.liveness import LinkTimes
from tandem.link.session import Session, Terms
from tandem.link.sockets import decode_to_worker
from tandem.protocol.card import (
    PROTOCOL_VERSION,
    Fingerprint,
    KVGroup,
    KVLayout,
    ModelCard,
    WorkerRole,
)
from tandem.protocol.ids import new_incarnation
from tandem.protocol.link import read_header
from tandem.protocol.messages import (
    Beat,
    Cancel,
    Frame,
    Hello,
    LoadReport,
    Submit,
    Welcome,
    WorkerBeat,
    encode,
)
from tandem.protocol.outputs import Accepted, EngineCoreOutput, FinishReason
from tandem.protocol.requests import EngineCoreRequest
from tandem.router.api.grpc import tandem_pb2 as pb

TEXT = "The quick brown fox jumps over the lazy dog, while it rains in Paris and nobody minds. "


def replay(port: int, token_ids: list[int], interval: float) -> None:
    """The worker: every ``interval`` a frame with the next token of each request."""
    incarnation = new_incarnation()
    group = KVGroup(num_layers=30, num_kv_heads=3, head_dim=64, block_size=64, dtype="float32")
    card = ModelCard(
        model="replay",
        fingerprint=Fingerprint(revision="r", dtype="float32", layout=KVLayout((group,))),
        max_model_len=8192,
        block_size=64,
        num_blocks=10_000,
        vocab_size=49_152,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_logprobs=20,
        role=WorkerRole.DECODE,
        incarnation=incarnation,
    )
    load = LoadReport(
        num_running=0, num_waiting=0, waiting_tokens=0, free_blocks=10_000, total_blocks=10_000
    )
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(f"tcp://127.0.0.1:{port}")
    terms = Terms(incarnation, "protocol", PROTOCOL_VERSION, LinkTimes())
    session, identity = Session(terms), b""
    running: dict[str, tuple[EngineCoreRequest, int]] = {}
    next_step = next_beat = time.monotonic()
    step = 0

    def send(message: Welcome | Frame | WorkerBeat) -> None:
        router.send_multipart([identity, session.seal(), encode(message)])

    while True:
        while router.poll(int(1000 * max(0.0, next_step - time.monotonic()))):
            identity, head, payload = router.recv_multipart()
            message = decode_to_worker(payload)
            if isinstance(message, Hello):
                session = Session(terms)
                session.answer(read_header(head), message)
                send(Welcome(card))
                continue
            if isinstance(message, Submit):
                key = message.request.key
                running[key.request] = (message.request, 0)
                send(Frame(step=step, accepted=(Accepted(key.request, key.attempt),)))
            elif isinstance(message, Cancel):
                running.pop(message.request, None)
        step += 1
        next_step += interval
        outputs = []
        for name, (request, position) in list(running.items()):
            last = position + 1 == request.params.max_tokens
            outputs.append(
                EngineCoreOutput(
                    name,
                    request.key.attempt,
                    0,
                    position,
                    (token_ids[position % len(token_ids)],),
                    finish=FinishReason.LENGTH if last else None,
                )
            )
            if last:
                del running[name]
            else:
                running[name] = (request, position + 1)
        if outputs:
            send(Frame(step=step, outputs=tuple(outputs)))
        if identity and time.monotonic() >= next_beat:
            next_beat = time.monotonic() + 1.0
            send(WorkerBeat(Beat(engine_step=step), load))


def route(port: int, worker_port: int, model: str, grpc_port: int) -> None:
    """The router, as ``tandem router`` runs it."""
    from tandem.router.app import serve
    from tandem.router.config import RouterConfig

    endpoint = f"127.0.0.1:{worker_port}"
    config = RouterConfig(port=port, workers=(endpoint,), model=model, grpc_port=grpc_port)
    serve(config, log_level="warning")


@contextmanager
def replayed(interval_ms: float) -> Iterator[tuple[int, int, psutil.Process]]:
    """A router before a worker that replays, ready: its ports of HTTP and gRPC, its process."""
    model = str(prepare(DEFAULT_MODEL, progress=False).path)
    from tandem.text.tokenizer import Tokenizer

    token_ids = Tokenizer.load(model).encode(TEXT)
    spawn = multiprocessing.get_context("spawn")
    worker_port, port, grpc_port = free_ports(3)
    worker = spawn.Process(target=replay, args=(worker_port, token_ids, interval_ms / 1000))
    router = spawn.Process(target=route, args=(port, worker_port, model, grpc_port))
    worker.start()
    router.start()
    try:
        asyncio.run(wait_ready(port))
        yield port, grpc_port, psutil.Process(router.pid)
    finally:
        for process in (router, worker):
            process.terminate()
            process.join(10)


async def read_stream(port: int, path: str, body: dict[str, object]) -> int:
    """Chunks of one stream."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    count = 0
    while True:
        line = await reader.readline()
        if line.startswith(b"data: [DONE]") or not line:
            break
        count += line.startswith(b"data: ")
    writer.close()
    return count


async def read_messages(channel: grpc.aio.Channel, tokens: int) -> int:
    """Messages of one stream of gRPC, as bytes."""
    sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True)
    asked = pb.GenerateRequest(prompt=TEXT, sampling=sampling, stream=True)
    call = channel.unary_stream("/tandem.v1.Inference/Generate")(asked.SerializeToString())
    return len([message async for message in call])


async def one_round(port: int, grpc_port: int, args: argparse.Namespace, endpoint: str) -> None:
    """All streams at once."""
    if endpoint in ("grpc", "grpc-shared"):
        # A connection each, as HTTP's streams have, or one for all.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}", options=options)
            for _ in range(args.streams if endpoint == "grpc" else 1)
        ]
        asked = [channels[n % len(channels)] for n in range(args.streams)]
        counts = await asyncio.gather(*(read_messages(each, args.tokens) for each in asked))
        await asyncio.gather(*(each.close() for each in channels))
        assert min(counts) >= args.tokens // 2, counts
        return
    chat = endpoint == "chat"
    body: dict[str, object] = {"max_tokens": args.tokens, "ignore_eos": True}
    if chat:
        body["messages"] = [{"role": "user", "content": TEXT}]
    else:
        body["prompt"] = TEXT
    path = "/v1/chat/completions" if chat else "/v1/completions"
    counts = await asyncio.gather(*(read_stream(port, path, body) for _ in range(args.streams)))
    assert min(counts) >= args.tokens // 2, counts


async def wait_ready(port: int) -> None:
    """Until /ready answers 200."""
    async with asyncio.timeout(60):
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            line = await reader.readline()
            writer.close()
            if b"200" in line:
                return
            await asyncio.sleep(0.1)


def cpu_seconds(process: psutil.Process) -> float:
    """User and system time of all its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=3)
    names = ("chat", "completions", "grpc", "grpc-shared")
    parser.add_argument("--endpoint", choices=names, action="append", help="again for several")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    args = parser.parse_args()
    endpoints = args.endpoint or ["chat"]
    with replayed(args.interval_ms) as (port, grpc_port, measured):
        costs: dict[str, list[float]] = {each: [] for each in endpoints}
        for turn in range(args.rounds + 1):
            for endpoint in endpoints:
                before = cpu_seconds(measured)
                asyncio.run(one_round(port, grpc_port, args, endpoint))
                spent = cpu_seconds(measured) - before
                if turn:  # the first warms
                    costs[endpoint].append(1e6 * spent / (args.streams * args.tokens))
        before = cpu_seconds(measured)
        time.sleep(5.0)
        idle = (cpu_seconds(measured) - before) / 5.0
        print(f"{args.streams} streams, a step every {args.interval_ms:g} ms, CPU per token in µs:")
        for endpoint, each in costs.items():
            shown = ", ".join(f"{cost:.0f}" for cost in each)
            print(f"{endpoint}: median {statistics.median(each):.0f} ({shown})")
        print(f"idle: {100 * idle:.1f} % of a core; {measured.memory_info().rss >> 20} MiB")
        if args.out:
            kept = {"streams": args.streams, "tokens": args.tokens, "interval_ms": args.interval_ms}
            told = {name: [round(cost, 1) for cost in each] for name, each in costs.items()}
            content = {**kept, "idle": round(idle, 4), "cpu_us_per_token": told}
            Path(args.out).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
