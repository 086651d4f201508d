"""Requests of a load: prompts of token ids, with their lengths and arrival times.

Prompts are ids, so that a server computes exactly the intended number of tokens. Random lengths and
shared prefixes as in vLLM's random data set; a trace gives lengths and times of real traffic.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.base.settings import (
    check_choices,
    check_integer,
    check_positive,
    setting,
)
from tandem.protocol.errors import InvalidParameter

_TIME, _PROMPT, _ANSWER = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FIELD = "dataset_path"


class Arrival(NamedTuple):
    """One row."""

    at: float
    """Seconds after the first row."""
    prompt: int
    """Number of prompt tokens."""
    answer: int
    """Number of answer tokens."""


def arrivals_of(path: Path) -> Iterator[Arrival]:
    """Yield the rows of a file in order. Raises InvalidParameter that names the invalid line."""
    first: datetime | None = None
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.DictReader(file)
            if not set(COLUMNS) <= set(rows.fieldnames or ()):
                wanted = ", ".join(COLUMNS)
                raise InvalidParameter(_FIELD, str(path), f"a CSV with columns {wanted}")
            for row in rows:
                place = f"{_FIELD}: {path}, line {rows.line_num}"
                when = _time(row[_TIME], place)
                first = first or when
                yield Arrival(
                    (when - first).total_seconds(),
                    _tokens(row[_PROMPT], f"{place}: {_PROMPT}"),
                    _tokens(row[_ANSWER], f"{place}: {_ANSWER}"),
                )
    except OSError as error:
        raise InvalidParameter(_FIELD, str(path), f"a file ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidParameter(_FIELD, str(path), f"a CSV in UTF-8 ({error})") from error


def _time(cell: str | None, place: str) -> datetime:
    """Return a cell's time. It is UTC if it has no zone, so that rows can be mixed."""
    try:
        when = datetime.fromisoformat(cell or "")
    except ValueError:
        allowed = "a time such as 2024-05-10 00:00:00.009930+00:00"
        raise InvalidParameter(f"{place}: {_TIME}", cell, allowed) from None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _tokens(cell: str | None, place: str) -> int:
    try:
        return int(cell or "")
    except ValueError:
        raise InvalidParameter(place, cell, "an integer") from None


_FIRST_ID = 1000
"""Lowest id of random prompts. Lower ids are bytes and special tokens in many vocabularies."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    prompt: list[int]
    max_tokens: int
    at: float | None = None
    """Seconds after the start; None: as soon as the concurrency limit allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """Data set and arrivals."""

    dataset_name: str = setting(
        "random", "Source of the prompts.", choices=("random", "prefix", "trace")
    )
    dataset_path: str | None = setting(
        None, "CSV of a trace: TIMESTAMP, ContextTokens, GeneratedTokens."
    )
    num_prompts: int = setting(100, "Total number of requests.", unit="requests")
    random_input_len: int = setting(1024, "Prompt length.", unit="tokens")
    random_output_len: int = setting(128, "Answer length.", unit="tokens")
    random_range_ratio: float = setting(
        0.0, "Range of random lengths: len * (1 - ratio) to len * (1 + ratio)."
    )
    prefix_len: int = setting(0, "Tokens that all prompts of a group share.", unit="tokens")
    num_prefixes: int = setting(1, "Groups of prompts with a common prefix.")
    random_vocab: int = setting(30_000, "Upper bound of the ids of random prompts.")
    max_model_len: int = setting(
        8192,
        "Maximum length of prompt and answer together. Longer ones of a trace are cut.",
        unit="tokens",
    )
    request_rate: float = setting(
        0.0, "Requests per second, at random times. 0: as fast as --max-concurrency allows."
    )
    burstiness: float = setting(
        1.0, "Shape of the gaps between requests. 1: a Poisson process; less: bursts."
    )
    trace_speed: float = setting(1.0, "Factor by which a trace is replayed faster.")
    seed: int = setting(0, "Seed of prompts, lengths and arrivals.")

    def __post_init__(self) -> None:
        check_choices(self)
        for name in ("num_prompts", "random_input_len", "random_output_len", "num_prefixes"):
            check_integer(name, getattr(self, name), 1)
        check_integer("prefix_len", self.prefix_len, 0)
        check_integer("random_vocab", self.random_vocab, _FIRST_ID + 1)
        check_integer("max_model_len", self.max_model_len, 2)
        check_positive("request_rate", self.request_rate, or_zero=True)
        check_positive("burstiness", self.burstiness)
        check_positive("trace_speed", self.trace_speed)
        if not 0 <= self.random_range_ratio < 1:
            raise InvalidParameter("random_range_ratio", self.random_range_ratio, "0 to below 1")
        if not self.prefix_len and (self.dataset_name == "prefix" or self.num_prefixes > 1):
            allowed = "1 or more with dataset_name=prefix or several num_prefixes"
            raise InvalidParameter("prefix_len", 0, allowed)
        if self.dataset_name == "trace" and not self.dataset_path:
            raise InvalidParameter("dataset_path", None, "a CSV file, as the data set is a trace")


def asks(config: LoadConfig) -> list[Ask]:
    """Return all requests of a run, in order of arrival. Raises InvalidParameter."""
    draw = np.random.default_rng(config.seed)
    if config.dataset_name == "trace":
        return _trace(config, draw)
    inputs = _lengths(config, config.random_input_len, draw)
    outputs = _lengths(config, config.random_output_len, draw)
    prompts = _prompts(config, inputs.tolist(), draw)
    times = arrivals(config, draw)
    return [
        Ask(prompt, int(length), at)
        for prompt, length, at in zip(prompts, outputs, times, strict=True)
    ]


def arrivals(config: LoadConfig, draw: np.random.Generator) -> list[float | None]:
    """Return arrival times, scaled to the exact rate; None for each in a closed loop."""
    if config.request_rate == 0:
        return [None] * config.num_prompts
    gaps = draw.gamma(
        config.burstiness, 1.0 / (config.request_rate * config.burstiness), config.num_prompts
    )
    times = np.cumsum(gaps)
    times *= config.num_prompts / config.request_rate / times[-1]
    return [float(at) for at in times - times[0]]


def _lengths(
    config: LoadConfig, mean: int, draw: np.random.Generator
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    low = max(1, round(mean * (1 - config.random_range_ratio)))
    high = max(low, round(mean * (1 + config.random_range_ratio)))
    return draw.integers(low, high + 1, config.num_prompts)


def _prompts(
    config: LoadConfig, lengths: Iterable[int], draw: np.random.Generator
) -> Iterator[list[int]]:
    prefixes = [
        _ids(config, config.prefix_len, draw) if config.prefix_len else []
        for _ in range(config.num_prefixes)
    ]
    for number, length in enumerate(lengths):
        prefix = prefixes[number % config.num_prefixes]
        yield [*prefix, *_ids(config, length, draw)]


def _ids(config: LoadConfig, count: int, draw: np.random.Generator) -> list[int]:
    ids: list[int] = draw.integers(_FIRST_ID, config.random_vocab, count).tolist()
    return ids


def _trace(config: LoadConfig, draw: np.random.Generator) -> list[Ask]:
    path = config.dataset_path or ""
    found: list[Ask] = []
    for row in islice(arrivals_of(Path(path)), config.num_prompts):
        output = max(1, min(row.answer, config.max_model_len - 1))
        prompt = max(1, min(row.prompt, config.max_model_len - output))
        found.append(Ask(_ids(config, prompt, draw), output, row.at / config.trace_speed))
    if not found:
        raise InvalidParameter("dataset_path", path, "a CSV of at least one request")
    return found
