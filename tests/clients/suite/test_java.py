"""Java's own HTTP client, which asks to upgrade to h2c with every call."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "java/Client.java"


def test_a_chat_and_a_stream() -> None:
    """Answered as HTTP/1.1; the streamed text is the whole one."""
    done = subprocess.run(["java", PROGRAM], timeout=120, capture_output=True, check=True)
    whole, streamed = map(json.loads, done.stdout.splitlines())
    assert whole["text"] == streamed["text"] != ""
    assert whole["version"] == streamed["version"] == "HTTP_1_1"
