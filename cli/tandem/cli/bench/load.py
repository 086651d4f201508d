"""Requests of a load: prompts of token ids, with their lengths and arrival times.

Random lengths and shared prefixes are those of vLLM's random data set; a trace has real ones.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem.base.settings import (
    check_integer,
    check_positive,
    setting,
)
from tandem.protocol.errors import InvalidParameter

_TIME, _PROMPT, _ANSWER = COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FIELD = "dataset_path"


class Arrival(NamedTuple):
    """Row of a trace."""

    at: float
    """Seconds after the first row."""
    prompt: int
    answer: int


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
    """Return a cell's time, in UTC if it has no zone."""
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
"""Lowest id of random prompts, above bytes and special tokens."""
_END_ID = 30_000
"""Upper bound of the ids of random prompts, below the size of most vocabularies."""


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

    dataset_path: str | None = setting(
        None,
        "CSV of a trace: TIMESTAMP, ContextTokens, GeneratedTokens. Requests of over 8,192 tokens "
        "are cut. Default: random prompts.",
    )
    num_prompts: int = setting(100, "Total number of requests.", unit="requests")
    random_input_len: int = setting(1024, "Prompt length.", unit="tokens")
    random_output_len: int = setting(128, "Answer length.", unit="tokens")
    max_model_len: int = 8192
    """Tokens of prompt and answer together; longer ones of a trace are cut."""
    request_rate: float = setting(
        0.0, "Requests per second, at random times. 0: as fast as --max-concurrency allows."
    )
    seed: int = setting(0, "Seed of prompts, lengths and arrivals.")

    def __post_init__(self) -> None:
        for name in ("num_prompts", "random_input_len", "random_output_len"):
            check_integer(name, getattr(self, name), 1)
        check_integer("max_model_len", self.max_model_len, 2)
        check_positive("request_rate", self.request_rate, or_zero=True)


def asks(config: LoadConfig) -> list[Ask]:
    """Return all requests of a run, in order of arrival. Raises InvalidParameter."""
    draw = np.random.default_rng(config.seed)
    if config.dataset_path is not None:
        return _trace(config, Path(config.dataset_path), draw)
    return [
        Ask(_ids(config.random_input_len, draw), config.random_output_len, at)
        for at in arrivals(config, draw)
    ]


def arrivals(config: LoadConfig, draw: np.random.Generator) -> list[float | None]:
    """Return arrival times, scaled to the exact rate; None for each in a closed loop."""
    if config.request_rate == 0:
        return [None] * config.num_prompts
    times = np.cumsum(draw.exponential(1.0 / config.request_rate, config.num_prompts))
    times *= config.num_prompts / config.request_rate / times[-1]
    return [float(at) for at in times - times[0]]


def _ids(count: int, draw: np.random.Generator) -> list[int]:
    ids: list[int] = draw.integers(_FIRST_ID, _END_ID, count).tolist()
    return ids


def _trace(config: LoadConfig, path: Path, draw: np.random.Generator) -> list[Ask]:
    found: list[Ask] = []
    for row in islice(arrivals_of(path), config.num_prompts):
        output = max(1, min(row.answer, config.max_model_len - 1))
        prompt = max(1, min(row.prompt, config.max_model_len - output))
        found.append(Ask(_ids(prompt, draw), output, row.at))
    if not found:
        raise InvalidParameter("dataset_path", str(path), "a CSV of at least one request")
    return found
