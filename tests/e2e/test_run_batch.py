"""`tandem run-batch` with the real model: by a pair that runs, and by a server of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stack import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 12,
        },
    ),
    ("/v1/completions", {"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}),
    ("/v1/embeddings", {"input": ["Paris", "Rome"]}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
]


def answers(tmp_path: Path, *flags: str) -> dict[str, Any]:
    """What stands in the output, by id."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": url, "body": body})
        for at, (url, body) in enumerate(REQUESTS)
    ]
    source.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "tandem.cli", "run-batch", "-i", str(source)]
    done = subprocess.run(
        [*command, "-o", str(target), *flags], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1, done.stderr  # one of them is wrong
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert {each["response"]["status_code"] for each in found} == {200, 400}
    return {each["custom_id"]: each["response"]["body"] for each in found}


def test_by_a_server_that_runs_and_by_one_of_its_own(pair: Stack, tmp_path: Path) -> None:
    """The same answers, and the server is gone afterwards."""
    by_pair = answers(tmp_path, "--url", pair.url)
    alone = answers(tmp_path, "--model", "smollm2")

    assert "Paris" in by_pair["0"]["choices"][0]["message"]["content"]
    for at in ("0", "1"):
        assert by_pair[at]["choices"] == alone[at]["choices"]
    assert len(by_pair["2"]["data"]) == 2
    assert by_pair["3"]["error"]["param"] == "temperature"
