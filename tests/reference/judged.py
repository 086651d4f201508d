"""Answers of transformers, stored next to this file.

``TANDEM_JUDGE=make`` asks transformers and stores its answers (`make reference`); ``check`` asks it
and compares them with the stored ones (`make nightly`). All other runs only read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODE = os.environ.get("TANDEM_JUDGE", "read")
assert MODE in ("read", "make", "check"), f"TANDEM_JUDGE is {MODE!r}; allowed: make, check"


class Judged:
    """Stored answers of one file of tests, by their keys; JSON values."""

    def __init__(self, name: str) -> None:
        self._file = Path(__file__).parent / f"{name}.json"
        self._known: dict[str, Any] = (
            json.loads(self._file.read_text()) if self._file.exists() else {}
        )

    def __call__(self, key: str, ask: Callable[[], Any]) -> Any:
        """Return the answer that is stored for the key."""
        if MODE == "read":
            return self._known[key]
        answer = json.loads(json.dumps(ask()))
        if MODE == "check":
            assert self._known[key] == answer, f"{key}: `make reference` stores another answer"
        self._known[key] = answer
        if MODE == "make":
            text = json.dumps(self._known, indent=1, sort_keys=True, ensure_ascii=False)
            self._file.write_text(text + "\n")
        return answer
