"""The server that the clients ask, and what they all ask of it."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.request
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL = os.environ["TANDEM_CLIENTS_URL"]
BASE = f"{URL}/v1"
KEY = os.environ["TANDEM_CLIENTS_KEY"]
WORKERS = os.environ["TANDEM_CLIENTS_WORKERS"].split()
"""Where workers tell their metrics."""
MODEL = "smol"
QUESTION = "Which city is the capital of France?"
CHAT: Any = [{"role": "user", "content": QUESTION}]
WEATHER: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
LONG = 1500
"""Tokens that nobody waits for: the stream is closed before."""
FREE_SECONDS = 20.0
"""What is held longer is held for good."""
MANY = 12
"""More requests at once than a client keeps connections by default for one host in a test."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Lyon"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "A city's weather.", "parameters": SCHEMA},
}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Paris", "Lyon"]
    is_capital: bool


def weather(city: Literal["Paris", "Lyon"]) -> str:
    return f"{city}: sunny, 20 degrees."


def prompt_tokens(messages: Any = CHAT) -> int:
    """How many tokens a chat has, by the server's own tokenizer."""
    request = urllib.request.Request(
        f"{URL}/tokenize",
        json.dumps({"model": MODEL, "messages": messages}).encode(),
        {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return int(json.load(answer)["count"])


def running() -> float:
    """Requests that workers hold, running or waiting."""
    total = 0.0
    for worker in WORKERS:
        with urllib.request.urlopen(worker, timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r"^vllm:num_requests_(?:running|waiting)(?:\{.*\})? (\S+)$", text, re.M)
        total += sum(float(each) for each in found)
    return total


def becomes(wanted: bool, seconds: float = FREE_SECONDS) -> bool:
    """Whether workers come to hold requests (or none) before the time is over."""
    deadline = time.monotonic() + seconds
    while (running() > 0) is not wanted:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
