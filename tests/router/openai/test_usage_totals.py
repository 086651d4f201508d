"""Usage that each chunk of a stream tells: counted by what is new, whatever else is in the call."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from tests.router.http_server import Served

from tandem.llm.outputs import RequestOutput
from tandem.router.api.openai.service import Totals


class Output:
    """One prompt's output, whose readings are counted by what is read."""

    def __init__(
        self, reads: Counter[str], prompt: int, generated: int, cached: int | None
    ) -> None:
        self._reads = reads
        self._values = {
            "prompt_token_ids": [0] * prompt,
            "num_generated_tokens": generated,
            "num_cached_tokens": cached,
        }

    def __getattr__(self, name: str) -> Any:
        self._reads[name] += 1
        return self._values[name]


def test_a_chunk_costs_the_same_whatever_else_is_in_the_call() -> None:
    """The newest output of a prompt stands for it, and is looked at once."""
    reads: Counter[str] = Counter()

    def output(*values: Any) -> RequestOutput:
        return cast(RequestOutput, Output(reads, *values))

    totals = Totals((number, output(3, 0, None)) for number in range(256))
    assert (totals.num_prompt, totals.num_generated, totals.num_cached) == (768, 0, 0)

    reads.clear()
    for generated in (1, 2, 5):
        totals.put(7, output(3, generated, 2))
    assert set(reads.values()) == {3}
    assert (totals.num_prompt, totals.num_generated, totals.num_cached) == (768, 5, 2)


def test_chunks_of_a_batch_tell_the_usage_so_far(well: Served) -> None:
    """Of all prompts together; the last one tells what the whole answer does."""
    body = {"model": "fake", "prompt": ["a", "b c", "d"], "max_tokens": 3}
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = well.post("/v1/completions", json=body).json()["usage"]
    stream = well.post(
        "/v1/completions", json={**body, "stream": True, "stream_options": options}
    ).text
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]

    assert counts == sorted(counts)
    assert counts[-1] == whole["completion_tokens"] == 9
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["prompt_tokens"]
