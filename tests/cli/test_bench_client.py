"""What `tandem bench` notes of a stream's events."""

from __future__ import annotations

import msgspec
import pytest

from tandem.cli.bench.client import Record, _decoder, _note


@pytest.mark.parametrize(
    ("choices", "times"),
    [
        ([{"text": "a"}], 1),
        ([{"text": ""}], 1),
        ([{"delta": {"content": ""}}], 1),
        ([{"text": "", "finish_reason": "stop"}], 1),
        ([], 0),
    ],
)
def test_a_step_without_text_has_its_time(choices: list[dict[str, object]], times: int) -> None:
    """Every chunk with a choice is a step; the one with the usage alone is none."""
    record = Record(1, 0.0)
    _note(record, _decoder.decode(msgspec.json.encode({"choices": choices})), 1.5)

    assert record.times == [1.5] * times
