"""A library that panics raises what is no Exception: requests end by it, threads do not."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tandem.engine.structured import GrammarError, NoBackend
from tandem.engine.structured.backends.guidance import GuidanceBackend
from tandem.engine.structured.constraint import Constraint, MaskThreads


class Panic(BaseException):
    """As pyo3's PanicException."""


class Panics:
    """A grammar whose masks cannot be made."""

    is_accepting = is_terminated = False

    def accept(self, token_ids: Any) -> None:
        """Anything goes."""

    def fill(self, words: Any) -> None:
        raise Panic("index out of bounds")


def test_a_mask_that_panics_ends_its_request(monkeypatch: pytest.MonkeyPatch):
    threads, woken = MaskThreads(1), threading.Event()
    made = Constraint(
        Panics(),  # type: ignore[arg-type]
        bytes(4),
        vocab_size=32,
        ends=(),
        threads=threads,
        wake=woken.set,
        refuse=lambda words: words,  # type: ignore[arg-type, return-value]
    )
    made.accept(3)
    with pytest.raises(GrammarError, match="Panic: index out of bounds"):
        made.is_ready(10.0)
    threads.close()


def test_a_job_that_panics_ends_no_thread():
    threads, done = MaskThreads(1), SimpleQueue[str]()

    def panic() -> None:
        raise Panic("no")

    assert threads.put(panic)
    assert threads.put(lambda: done.put("done"))
    assert done.get(timeout=10) == "done"
    threads.close()
    assert not threads.put(panic)


def test_a_tokenizer_that_panics_is_refused(tmp_path: Path):
    """A token of 3,000 bytes is deeper than the backend's trie; requests are told so."""
    vocab = {chr(33 + at): at for at in range(94)} | {"a" * 3000: 94}
    flags = {"add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", **flags},
        "decoder": {"type": "ByteLevel", **flags},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(NoBackend, match=r"tokenizer\.json: assertion failed"):
        GuidanceBackend(tmp_path, 95)
