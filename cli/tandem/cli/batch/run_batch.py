"""`tandem run-batch`: answers all requests of a file, in OpenAI's batch format.

It uses a running server (--url), or starts one for the file (--model). All lines are checked first.
Answers are written as they arrive; the output gets its name when it is complete.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx

from tandem.cli.batch.requests import (
    Batch,
    ServerGone,
    check_lines,
    read_lines,
)
from tandem.cli.inspect.requests import check_url, key_headers
from tandem.cli.serve import listening
from tandem.cli.serve.own_server import check_flags, own_server
from tandem.cli.settings.command import Parser, check_place, words
from tandem.cli.settings.secret_flags import ENV_API_KEY
from tandem.link.sockets import raise_descriptor_limit
from tandem.protocol.errors import InvalidParameter

OUTPUT = "--output-file"


@contextmanager
def opened(source: str) -> Iterator[BinaryIO]:
    """Yield the input; a pipe or device is copied first. Raises OSError."""
    with open(source, "rb") as given:
        if Path(source).is_file():
            yield given
            return
        with tempfile.TemporaryFile() as kept:
            shutil.copyfileobj(given, kept)
            kept.seek(0)
            yield kept


def places(output: str, source: str) -> tuple[Path, Path]:
    """Return the file for answers, and its final name, with links followed.

    Raises InvalidParameter if either would replace the input or is not a regular file.
    """
    if os.path.exists(output) and not os.path.isfile(output):
        raise InvalidParameter(OUTPUT, output, "a regular file, or a new one")
    target = Path(os.path.realpath(output))
    partial = target.with_name(f"{target.name}.part")
    check_place(OUTPUT, str(target))
    if os.path.lexists(partial) and (partial.is_symlink() or not partial.is_file()):
        raise InvalidParameter(OUTPUT, output, f"one next to which {partial} is a file, or nothing")
    for written in (target, partial):
        if written.exists() and os.path.exists(source) and written.samefile(source):
            raise InvalidParameter(OUTPUT, output, f"another file than the input, {source}")
    return partial, target


SAY_EVERY = 10.0
"""Seconds between two progress lines."""
STOP_SECONDS = 60.0
CONCURRENCY = 64
MAX_CONCURRENCY = 4_096
DESCRIPTORS_KEPT = 64
"""Descriptors for other files, streams and lookups."""
_POLL = 0.25


def run(argv: list[str]) -> int:
    """Answer the requests of a file. Return 1 if one was not answered with 200."""
    parser = Parser(prog="tandem run-batch", description=__doc__)
    parser.add_argument(
        "-i", "--input-file", required=True, help="file of requests, one JSON object per line"
    )
    parser.add_argument("-o", "--output-file", required=True, help="file to write the answers to")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument(
        "--model", help="model for which a server is started, as for `tandem serve`"
    )
    parser.add_argument(
        "--serve-flags", default="", help="flags of that `tandem serve`, as one string"
    )
    parser.add_argument("--api-key", help=f"bearer token; default: {ENV_API_KEY}")
    parser.add_argument(
        "--concurrency",
        type=int,
        help=f"concurrent requests; default: {CONCURRENCY}, or as many as descriptors allow",
    )
    parser.add_argument(
        "--max-attempts", type=int, default=5, help="maximum number of attempts of a request"
    )
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds of one attempt")
    parser.add_argument(
        "--ready-seconds",
        type=float,
        default=900.0,
        help="seconds in which the server must be ready, including a download",
    )
    options = parser.read(argv)
    _check(options)
    written = places(options.output_file, options.input_file)
    with opened(options.input_file) as source:
        total = check_lines(source)
        if not total:
            allowed = "a file of at least one request"
            raise InvalidParameter("--input-file", options.input_file, allowed)
        with _server(options) as url:
            return _answer(options, url, source, total, written)


def _check(options: argparse.Namespace) -> None:
    if (options.url is None) is (options.model is None):
        raise InvalidParameter("--url", options.url, "a server's URL, or --model in its place")
    if options.url is not None:
        check_url("--url", options.url)
    key_headers(options.api_key)
    check_flags("--serve-flags", words("--serve-flags", options.serve_flags))
    if options.serve_flags and options.model is None:
        raise InvalidParameter("--serve-flags", options.serve_flags, "only with --model")
    if not 1 <= options.max_attempts <= 100:
        raise InvalidParameter("--max-attempts", options.max_attempts, "an integer, 1 to 100")
    options.concurrency = _concurrency(options.concurrency)
    for name in ("timeout", "ready_seconds"):
        if not 0 < (value := getattr(options, name)) < math.inf:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidParameter(flag, value, "a finite number above 0")


def _concurrency(given: int | None) -> int:
    """Return the number of concurrent requests, within the file descriptors."""
    may_open = raise_descriptor_limit(1)
    most = max(1, min(MAX_CONCURRENCY, may_open - DESCRIPTORS_KEPT))
    if given is None:
        return min(CONCURRENCY, most)
    if not 1 <= given <= most:
        why = "" if most == MAX_CONCURRENCY else f": this process may open {may_open:,} files"
        raise InvalidParameter("--concurrency", given, f"an integer, 1 to {most:,}{why}")
    return given


@contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    """Yield the URL of the server, started if none is given."""
    if options.url is not None:
        yield options.url
        return
    flags = ["--model", options.model, *words("--serve-flags", options.serve_flags)]
    with own_server(flags, stop_seconds=STOP_SECONDS, output=sys.stderr) as server:
        server.wait_ready(options.ready_seconds, poll=_POLL)
        yield server.url


def _answer(
    options: argparse.Namespace,
    url: str,
    source: BinaryIO,
    total: int,
    written: tuple[Path, Path],
) -> int:
    partial, target = written
    started = reported_at = time.monotonic()

    def report(batch: Batch) -> None:
        nonlocal reported_at
        done = batch.answered + batch.failed
        if done == total or time.monotonic() >= reported_at + SAY_EVERY:
            reported_at = time.monotonic()
            _print_progress(batch, total, reported_at - started)

    async def ask() -> Batch:
        limits = httpx.Limits(max_connections=options.concurrency)
        async with httpx.AsyncClient(
            base_url=url,
            headers=key_headers(options.api_key),
            timeout=options.timeout,
            limits=limits,
            mounts=listening.mounts(url),
        ) as client:
            batch = Batch(client, output, options.concurrency, options.max_attempts, report)
            await batch.run(read_lines(source))
            return batch

    with partial.open("wb") as output:
        try:
            batch = asyncio.run(ask())
        except ServerGone:
            raise OSError(
                f"no server answers at {url}; the answers received are in {partial}"
            ) from None
    if (done := batch.answered + batch.failed) != total:
        raise OSError(
            f"{options.input_file} changed while it was read: it had {total:,} requests, {done:,} "
            f"were sent, whose answers are in {partial}"
        )
    partial.replace(target)
    return 1 if batch.failed else 0


def _print_progress(batch: Batch, total: int, seconds: float) -> None:
    done = batch.answered + batch.failed
    rate = f"{batch.tokens / max(seconds, 1e-9):,.0f} tokens/s"
    failed = f", {batch.failed:,} failed" if batch.failed else ""
    print(f"tandem run-batch: {done:,} of {total:,}{failed}, {rate}", file=sys.stderr, flush=True)
