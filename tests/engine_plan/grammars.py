"""Grammars over token ids for the plan half's tests, compiled when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tests.engine_plan.builders import VOCAB, Harness, params_of
from tests.waiting import Deadline

from tandem.engine.structured import GrammarError, StructuredOutputManager
from tandem.engine.structured.errors import NotNow
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.structured import StructuredOutputsParams

SECONDS = 100.0
"""Of a thread that is let go of by then: less than a test gets."""


class Paths:
    """A grammar of a few whole answers in tokens."""

    def __init__(self, answers: Sequence[tuple[int, ...]], compiler: HandCompiler) -> None:
        self._answers = answers
        self._compiler = compiler
        self._tokens: tuple[int, ...] = ()

    @property
    def _open(self) -> list[tuple[int, ...]]:
        at = len(self._tokens)
        return [each for each in self._answers if each[:at] == self._tokens and len(each) > at]

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if len(self._tokens) == self._compiler.fickle_at or not any(
                each[len(self._tokens)] == token for each in self._open
            ):
                raise GrammarError(f"{token} after {self._tokens}")
            self._tokens += (token,)

    def fill(self, words: memoryview) -> None:
        """See Grammar; waits while masks are held."""
        assert self._compiler.masks.wait(SECONDS)
        if self._tokens[-1:] == (self._compiler.hopeless,):
            raise GrammarError("too complex")
        for each in self._open:
            token = each[len(self._tokens)]
            words[token // 8] |= 1 << token % 8

    @property
    def is_accepting(self) -> bool:
        return self._tokens in self._answers

    @property
    def is_terminated(self) -> bool:
        return not self._open and not self._compiler.late

    def copy(self) -> Paths:
        other = Paths(self._answers, self._compiler)
        other._tokens = self._tokens
        return other


class HandCompiler:
    """Compiles answers written as "1 2 3|1 4", each when it may."""

    def __init__(self) -> None:
        self.may = threading.Event()
        """Cleared: who compiles waits."""
        self.held: str | None = None
        """A text that is compiled after ``let_go`` alone."""
        self.let_go = threading.Event()
        self.masks = threading.Event()
        """Cleared: who makes a mask waits."""
        self.hopeless: int | None = None
        """A token after which no mask is made."""
        self.fickle_at: int | None = None
        """A position at which nothing that the mask allowed is accepted."""
        self.late = False
        """An answer's end is seen by its mask alone."""
        self.compiled: list[str] = []
        self.closed = False
        self.may.set()
        self.masks.set()

    def compile(self, wanted: StructuredOutputsParams, /) -> Paths:
        text = wanted.regex or ""
        assert self.may.wait(SECONDS)
        assert text != self.held or self.let_go.wait(SECONDS)
        self.compiled.append(text)
        if text == "later":
            raise NotNow("others take long")
        if not text[0].isdigit():
            raise GrammarError("what begins with a digit")
        answers = [tuple(map(int, each.split())) for each in text.split("|")]
        return Paths(answers, self)

    def close(self) -> None:
        self.closed = True

    def hold(self, held: bool) -> None:
        """Have all threads stand still, or go on."""
        for event in (self.may, self.masks):
            if held:
                event.clear()
            else:
                event.set()

    def wait(self, gate: StructuredOutputManager, engine: Harness) -> None:
        """Until every grammar that was begun is compiled, and every mask made."""
        for begun in list(gate._begun.values()):
            begun.constraint.exception(SECONDS)
        for request in list(engine.core.scheduler.request_table.constrained._requests.values()):
            assert request.constraint is not None
            request.constraint.is_ready(SECONDS)

    def gate(self) -> StructuredOutputManager:
        return StructuredOutputManager(lambda name: self, vocab_size=VOCAB)


def constrained(answers: str, **fields: Any) -> SamplingParams:
    """Parameters of a request that is to say one of ``answers``."""
    wanted = StructuredOutputsParams(regex=answers)
    return params_of(**{"max_tokens": 8, "structured_outputs": wanted} | fields)


def run(*engines: Harness) -> None:
    """Steps until nothing is left anywhere; threads are given time."""
    deadline = Deadline(every=0.001)
    while any(each.core.has_work for each in engines):
        moved = [each.step().progressed for each in engines]
        if not any(moved):
            for each in engines:
                each.rest()
        deadline.check(lambda: [each.core.stats() for each in engines])


def step_until(engine: Harness, check: Any) -> None:
    deadline = Deadline(every=0.001)
    while not check():
        if not engine.step().progressed:
            engine.rest()
        deadline.check(engine.core.stats)
