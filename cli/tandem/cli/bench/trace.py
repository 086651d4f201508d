"""Real traffic from a CSV file in Azure's format: arrival time and lengths of each request.

Called by ``load``, which makes prompts of the lengths.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

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
