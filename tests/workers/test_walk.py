"""A hand-off passes few files of the decode worker's transfer thread."""

from __future__ import annotations

import threading
import tomllib
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.workers.pair import Pair

LIMITS = tomllib.loads((Path(__file__).parents[2] / "house.toml").read_text())["walks"]


def test_a_handoff_passes_few_files() -> None:
    """The second hand-off over shared memory counts: the first one connects."""
    files: set[str] = set()
    counts = threading.Event()

    def enter(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        is_counted = counts.is_set() and threading.current_thread().name == "kv-transfer-d"
        if is_counted and event == "call" and "/tandem/" in name:
            files.add(name.rpartition("/tandem/")[2])

    threading.setprofile(enter)
    try:
        pair = Pair("shm")
    finally:
        threading.setprofile(None)
    try:
        for name in ("first", "second"):
            pair.ask(name)
            pair.until(partial(pair.decode.finished, name))
            counts.set()
    finally:
        pair.close()
    print(len(files), *sorted(files), sep="\n")
    assert 0 < len(files) <= LIMITS["handoff_files"]
