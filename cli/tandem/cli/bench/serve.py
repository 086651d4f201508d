"""`tandem bench serve`: load on any OpenAI URL, at a rate, at a concurrency, or from a trace."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tandem.cli import loopback
from tandem.cli.bench.client import Record, Target
from tandem.cli.bench.drive import Bounds, drive, drive_in_processes
from tandem.cli.bench.load import LoadConfig, asks
from tandem.cli.bench.report import plot, save, show
from tandem.cli.bench.summary import parse_goodput, summarize
from tandem.cli.command import parse
from tandem.cli.flags import Section
from tandem.cli.places import check_place
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.settings import (
    check_integer,
    check_optional_integer,
    check_positive,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Server, pace, and what to show."""

    base_url: str = setting("http://127.0.0.1:8000", "Server, without /v1.")
    endpoint: str = setting("/v1/completions", "Path of the completions endpoint.")
    model: str | None = setting(None, "Model to ask for; the server's first, if not given.")
    api_key: str | None = setting(None, "Bearer token.")
    max_concurrency: int | None = setting(None, "Requests at once, at most.", unit="requests")
    client_processes: int = setting(
        1, "Processes that send and read; one reads some thousand tokens a second."
    )
    num_warmups: int = setting(1, "Requests before the measured ones.", unit="requests")
    ignore_eos: bool = setting(True, "Ask for answers of exactly the wanted length.")
    temperature: float = setting(0.0, "Sampling temperature.")
    timeout: float = setting(3600.0, "Longest that one request may take.", unit="s")
    metric_percentiles: str = setting("90,99", "Ranks to show, in percent, with commas between.")
    goodput: tuple[str, ...] = setting(
        (), "Bound in milliseconds, ttft:200, tpot:50 or e2el:5000; may be given more than once."
    )
    result: str | None = setting(None, "JSON file to write.")
    save_detailed: bool = setting(False, "Put the times of every request into it.")
    plot: str | None = setting(None, "Picture of latencies over time to write (png, svg, pdf).")

    def __post_init__(self) -> None:
        check_place("result", self.result)
        check_place("plot", self.plot)
        if self.save_detailed and self.result is None:
            raise InvalidParameter("save_detailed", True, "only with result, the file to write")
        check_optional_integer("max_concurrency", self.max_concurrency, 1)
        check_integer("client_processes", self.client_processes, 1, 64)
        check_integer("num_warmups", self.num_warmups, 0)
        check_positive("timeout", self.timeout)
        parse_goodput(self.goodput)
        self.ranks()

    def ranks(self) -> list[float]:
        """Return the percentiles as numbers."""
        try:
            ranks = [float(rank) for rank in self.metric_percentiles.split(",")]
        except ValueError:
            ranks = []
        if not ranks or not all(0 < rank <= 100 for rank in ranks):
            allowed = "numbers above 0, up to 100, with commas between"
            raise InvalidParameter("metric_percentiles", self.metric_percentiles, allowed)
        return ranks


def run(argv: list[str]) -> int:
    """Measure. Return 1 if a request failed."""
    sections = [Section("Server and results", ServeConfig), Section("Load", LoadConfig)]
    given: dict[type, dict[str, Any]] = parse("bench serve", __doc__ or "", sections, argv)
    config, load = ServeConfig(**given[ServeConfig]), LoadConfig(**given[LoadConfig])
    target = _target(config)
    result, records = measure(config, load, target)
    if config.result:
        save(Path(config.result), result, records, detailed=config.save_detailed)
    show(result)
    if config.plot:
        plot(Path(config.plot), records)
    return 1 if result["failed"] else 0


def measure(
    config: ServeConfig, load: LoadConfig, target: Target
) -> tuple[dict[str, Any], list[Record]]:
    """Warm up, send the load, and sum it up."""
    bounds = Bounds(max_concurrency=config.max_concurrency, timeout=config.timeout)
    if config.num_warmups:
        warm = asks(_warming(load, config.num_warmups))
        asyncio.run(drive(target, warm, bounds, done=lambda _: None))
    todo = asks(load)
    with _Progress(len(todo)) as progress:
        if config.client_processes > 1:
            records, seconds = drive_in_processes(
                target, todo, bounds, processes=config.client_processes, done=progress.step
            )
        else:
            records, seconds = asyncio.run(drive(target, todo, bounds, done=progress.step))
    result = summarize(
        records,
        seconds,
        percentiles=config.ranks(),
        goodput=parse_goodput(config.goodput),
    )
    result["settings"] = {**asdict(load), **_public(config), "model": target.model}
    return result, records


def _warming(load: LoadConfig, count: int) -> LoadConfig:
    """Return a load with other prompts of the same lengths, so that none of ``load`` is cached."""
    seed = load.seed + (1 << 32)
    return replace(load, num_prompts=count, seed=seed, request_rate=0.0, dataset_name="random")


def _public(config: ServeConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if name != "api_key"}


def _target(config: ServeConfig) -> Target:
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    model = config.model or _first_model(config, headers)
    body: dict[str, Any] = {"temperature": config.temperature}
    if config.ignore_eos:
        body["ignore_eos"] = True
    return Target(config.base_url.rstrip("/") + config.endpoint, model, headers, body)


def _first_model(config: ServeConfig, headers: dict[str, str]) -> str:
    url = config.base_url.rstrip("/") + "/v1/models"
    try:
        with httpx.Client(mounts=loopback.mounts(url), timeout=10) as client:
            answer = client.get(url, headers=headers)
        answer.raise_for_status()
        name: str = answer.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError) as error:
        problem = f"a server that lists its models ({error})"
        raise InvalidParameter("base_url", config.base_url, problem) from error
    return name


class _Progress:
    """A bar on the error stream, so that the table may be piped."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

        self._bar = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, _: Record) -> None:
        """Count a request that has ended."""
        self._bar.advance(self._task)
