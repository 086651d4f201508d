"""First tokens of two servers, asked in turn: python bench/http/pair.py URL URL --tokens 512.

For differences too small for two runs on two machines. Both servers run on one machine (and one
GPU, ``--worker-flags="--gpu-memory-utilization 0.4"``); one client sends a random prompt to each of
them, in an order drawn anew, over one connection each. Prints the median time to the first event of
each, and the median of the differences with its standard error, in ms.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import time
from urllib.parse import urlsplit

PAUSE_S = 0.002
END = b"0\r\n\r\n"


def connected(url: str) -> socket.socket:
    """A connection that sends at once."""
    where = urlsplit(url)
    made = socket.create_connection((where.hostname or "127.0.0.1", where.port or 80), timeout=30)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def first_token_ms(wire: socket.socket, tokens: int, vocabulary: int) -> float:
    """Ask for one token after a random prompt. Raises ConnectionError when the server ends it."""
    asked = {"prompt": random.choices(range(vocabulary), k=tokens), "max_tokens": 1}
    body = json.dumps({**asked, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    sent, first, seen = time.perf_counter(), None, b""
    wire.sendall(head.encode() + body)
    while END not in seen:
        part = wire.recv(1 << 16)
        if not part:
            raise ConnectionError(f"the server ended the connection after {seen[-200:]!r}")
        seen += part
        if first is None and b"data: {" in seen:
            first = time.perf_counter()
    if first is None:
        raise ConnectionError(f"no token came: {seen[-200:]!r}")
    return 1e3 * (first - sent)


def main() -> None:
    """Ask both, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs=2)
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=40_000)
    args = parser.parse_args()
    wires = [connected(url) for url in args.urls]
    times: list[list[float]] = [[], []]
    for _ in range(args.requests):
        for which in random.sample((0, 1), 2):
            times[which].append(first_token_ms(wires[which], args.tokens, args.vocabulary))
            time.sleep(PAUSE_S)
    apart = [one - other for one, other in zip(*times, strict=True)]
    error = 1.25 * statistics.stdev(apart) / len(apart) ** 0.5
    shown = " / ".join(f"{statistics.median(each):.3f}" for each in times)
    print(f"{args.tokens} tokens: {shown} ms, apart {statistics.median(apart):.3f} +- {error:.3f}")


if __name__ == "__main__":
    main()
