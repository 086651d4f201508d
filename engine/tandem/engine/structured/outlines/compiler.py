"""Compiles texts to automata, each once: equal texts share what was made of the first."""

from __future__ import annotations

import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tandem.engine.structured.grammar import GrammarError, NotNow, Waits, untold
from tandem.engine.structured.llguidance import read_tokenizer
from tandem.engine.structured.outlines.compile_process import OvertimeError
from tandem.engine.structured.outlines.grammar import Automaton, OutlinesGrammar
from tandem.engine.structured.outlines.jobs import Job, job_of
from tandem.engine.structured.outlines.lanes import Lanes
from tandem.engine.structured.outlines.vocabulary import Vocabulary
from tandem.protocol.structured import StructuredOutputsParams

MAX_KEPT = 64
"""Texts whose automata, or refusals, are kept."""
MAX_KEPT_BYTES = 256 << 20
OVERTIME_KEPT_SECONDS = 60.0
"""A text that took too long is not tried again for so long."""
_WAIT_SECONDS = 60.0
"""For another thread that has the same text; processes end long before."""


@dataclass(slots=True)
class _Kept:
    """What became of a text, or will."""

    made: Future[Automaton] = field(default_factory=Future)
    until: float = float("inf")
    """When it is tried again."""


class OutlinesCompiler:
    """Implements Compiler for the tokenizer.json of a prepared folder."""

    def __init__(self, folder: Path, vocab_size: int, lanes: Lanes | None = None) -> None:
        """Reads the tokenizer, and has a process begin. Raises NoCompiler where it cannot be
        used."""
        tokenizer = read_tokenizer(folder, vocab_size)
        ends = set(tokenizer.eos_tokens)
        tokens = [
            b""
            if token in ends or tokenizer.is_special_token(token)
            else tokenizer.decode_bytes([token])
            for token in range(min(tokenizer.vocab_size, vocab_size))
        ]
        self._vocabulary = Vocabulary(tokens, vocab_size)
        self._lanes = lanes or Lanes()
        self._lanes.start()
        self._kept: OrderedDict[Job, _Kept] = OrderedDict()
        self._lock = Lock()
        """Of ``_kept``; nothing is compiled while it is held."""

    @property
    def is_preparing(self) -> bool:
        """See Compiler."""
        return self._lanes.is_preparing

    def compile(self, wanted: StructuredOutputsParams, waits: Waits = untold, /) -> OutlinesGrammar:
        """See Compiler."""
        job = job_of(wanted)
        with self._lock:
            kept = self._kept.get(job)
            if kept is not None and kept.until <= time.monotonic():
                del self._kept[job]
                kept = None
            mine = kept is None
            if kept is None:
                kept = self._kept[job] = _Kept()
            self._kept.move_to_end(job)
        if mine:
            self._make(job, kept, waits)
        else:
            waits(True)
        return OutlinesGrammar(kept.made.result(_WAIT_SECONDS))

    def close(self) -> None:
        """See Compiler."""
        self._lanes.close()

    def _make(self, job: Job, kept: _Kept, waits: Waits) -> None:
        """Into ``kept``, which another thread may wait for."""
        try:
            automaton = Automaton(self._lanes.compile(job, waits), self._vocabulary)
        except OvertimeError as error:
            kept.until = time.monotonic() + OVERTIME_KEPT_SECONDS
            kept.made.set_exception(error)
        except BaseException as error:
            if not isinstance(error, GrammarError) or isinstance(error, NotNow):
                kept.until = 0.0  # no fault of the text
            kept.made.set_exception(error)
        else:
            kept.made.set_result(automaton)
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        """Keep no more than is allowed, those used last."""
        sizes = {
            job: kept.made.result().nbytes if kept.made.exception() is None else 0
            for job, kept in self._kept.items()
            if kept.made.done()
        }
        total = sum(sizes.values())
        for job, size in sizes.items():
            if len(self._kept) <= MAX_KEPT and total <= MAX_KEPT_BYTES:
                break
            del self._kept[job]
            total -= size
