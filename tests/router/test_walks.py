"""A chat passes few files and functions of the router before its workers have it."""

from __future__ import annotations

import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.router.fake_worker import FakeWorker
from tests.router.http_server import Served

ROOT = Path(__file__).parents[2]
LIMITS = tomllib.loads((ROOT / "house.toml").read_text())["walks"]
CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Hi there " * 40}],
    "max_tokens": 4,
}


class Walk:
    """Counts the functions that threads begun after ``start`` enter, from the first byte of a
    request until it was submitted to both workers."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self.submits = 0
        self.is_armed = False
        """Whether the next byte that arrives opens the walk."""
        self._is_open = False

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def start(self) -> None:
        threading.setprofile(self._enter)

    def _enter(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or "/tandem/" not in frame.f_code.co_filename:
            return
        file, name = frame.f_code.co_filename.rpartition("/tandem/")[2], frame.f_code.co_qualname
        self._is_open |= self.is_armed and name.endswith("data_received")
        if not self._is_open or self.submits == 2:
            return
        self.functions.add((file, name))
        self.submits += name == "WorkerConnection.submit"
        if self.submits == 2:
            sys.setprofile(None)


def walk_of_a_chat(small_model: Path, workers: list[FakeWorker]) -> Walk:
    """Send one chat through a new router."""
    walk = Walk()
    walk.start()
    try:
        served = Served(str(small_model), workers)
    finally:
        threading.setprofile(None)
    walk.is_armed = True
    try:
        assert served.post("/v1/chat/completions", json=CHAT).status_code == 200
    finally:
        served.stop()
    assert walk.submits == 2
    return walk


def test_a_chat_passes_few_files_and_functions(
    small_model: Path,
    decode: Callable[..., FakeWorker],
    prefill: Callable[..., FakeWorker],
) -> None:
    """The smallest of three walks counts: on a busy machine a beat falls into one of them."""
    walks = [walk_of_a_chat(small_model, [decode(), prefill()]) for _ in range(3)]
    walk = min(walks, key=lambda each: len(each.functions))
    found = {"chat_files": len(walk.files), "chat_functions": len(walk.functions)}
    print(found, *sorted(walk.files), sep="\n")
    assert all(count <= LIMITS[name] for name, count in found.items()), found
