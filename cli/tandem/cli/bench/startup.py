"""`tandem bench startup`: seconds from the start of a server's process to its first token."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from tandem.base.settings import check_integer, setting
from tandem.cli.serve import listening
from tandem.cli.serve.own_server import OwnServer, own_server
from tandem.cli.settings.command import check_place, parse
from tandem.cli.settings.flags import Section
from tandem.protocol.errors import TandemError

_POLL = 0.02
_START_SECONDS = 600.0
_STOP_SECONDS = 30.0
_SHOWN_LINES = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupConfig:
    """Settings of the server and the number of starts."""

    model: str | None = setting(None, "A folder, a GGUF file, a hub id or package:NAME.")
    worker_flags: tuple[str, ...] = setting(
        (), "Further arguments of the worker, e.g. --worker-flags=--load-format=dummy."
    )
    num_iters: int = setting(3, "Number of starts.")
    output_json: str | None = setting(None, "JSON file to write.")

    def __post_init__(self) -> None:
        check_place("output_json", self.output_json)
        check_integer("num_iters", self.num_iters, 1)


def run(argv: list[str]) -> int:
    """Start a server, send a request and stop it. Print each start's seconds."""
    given = parse("bench startup", __doc__ or "", [Section("Start", StartupConfig)], argv)
    config = StartupConfig(**given[StartupConfig])
    starts = []
    for number in range(config.num_iters):
        starts.append(start(config))
        shown = ", ".join(f"{name} {value:.2f}" for name, value in starts[-1].items())
        print(f"start {number + 1}: {shown}", flush=True)
    if config.output_json:
        Path(config.output_json).write_text(json.dumps(starts, indent=1) + "\n")
    return 0


def start(config: StartupConfig) -> dict[str, float]:
    """Return the seconds until ready and until the first token of one new server."""
    flags = ["--model", config.model] if config.model else []
    flags += [f"--worker-flags={' '.join(config.worker_flags)}"] if config.worker_flags else []
    with tempfile.TemporaryFile() as log:
        started = time.perf_counter()
        try:
            with own_server(
                flags, ready_seconds=_START_SECONDS, stop_seconds=_STOP_SECONDS, output=log
            ) as server:
                return _measured(server, started)
        except (TandemError, httpx.HTTPError, ValueError, LookupError) as error:
            print(f"Last output of the server:\n{_last_lines(log)}", file=sys.stderr)
            if isinstance(error, TandemError):
                raise
            raise TandemError(f"the server did not answer as it should: {error}") from error


def _measured(server: OwnServer, started: float) -> dict[str, float]:
    server.wait_ready(_START_SECONDS, poll=_POLL)
    ready = time.perf_counter() - started
    with httpx.Client(
        base_url=server.url, timeout=_START_SECONDS, mounts=listening.mounts(server.url)
    ) as client:
        body = {"prompt": [1000, 1001, 1002], "max_tokens": 1, "temperature": 0}
        models = client.get("/v1/models").raise_for_status()
        body["model"] = models.json()["data"][0]["id"]
        client.post("/v1/completions", json=body).raise_for_status()
    return {"ready_s": ready, "first_token_s": time.perf_counter() - started}


def _last_lines(log: IO[bytes]) -> str:
    log.seek(0)
    return "\n".join(log.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:])
