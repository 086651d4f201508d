"""The gate of structured output: grammars are compiled beside the step loop.

A grammar is of one request at a time, since those that share what a backend finds out about a text
wait for each other; when the request ends, it is kept for the next with the same text, few of them.
What such a one finds exhausted by the answers before, it gets compiled anew, in the midst of its
answer, too.
The tokenizer is read with the first: a worker that nobody asks for structured output has no thread
and no tokenizer here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock

from tandem.engine.config import EngineConfig
from tandem.engine.request import Request
from tandem.engine.step import SeqId
from tandem.engine.structured.backends import COMPILING_THREADS, make_compiler
from tandem.engine.structured.constraint import Constraint, Renew, make_mask
from tandem.engine.structured.grammar import (
    Compiler,
    Grammar,
    GrammarError,
    NoCompiler,
    NotNow,
    Waits,
    untold,
)
from tandem.engine.structured.mask_threads import MaskThreads
from tandem.protocol.errors import InvalidParameter, Refusal, RefusalCode
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""A request whose grammar is not compiled by then is refused; the compiler is there by then. Where
others are compiled before it, this bounds the wait for its turn, and then its own time."""
MAX_GRAMMARS = 32
"""Compiled grammars that are kept while nobody uses them."""
_CLOSED = "the engine is closed"
_NO_ANSWER = "what has an answer: no text of a token or more matches"


@dataclass(slots=True)
class _Begun:
    """A request's way through the gate."""

    wanted: StructuredOutputsParams
    constraint: Future[Constraint]
    grammar: Future[Grammar] | None = None
    reused: bool = False
    """Whether that one has followed other answers."""
    waits: bool = True
    """Whether other texts are before its own. Written by the thread that compiles."""

    def say_waits(self, waits: bool) -> None:
        """See Waits."""
        self.waits = waits


class StructuredOutputManager:
    """Compiles, and gives requests their constraints. Implements Gate; the step loop's, but for
    what its threads do."""

    seconds = COMPILE_SECONDS

    def __init__(
        self,
        make_compiler: Callable[[], Compiler],
        *,
        vocab_size: int,
        threads: int = 2,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``make_compiler`` is called once, in a thread, at the first use; GrammarError says why
        there is none. ``threads`` compile. ``wake``: the step loop is to look again; called by any
        thread."""
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._num_threads = threads
        self._wake = wake
        self._compiler: Compiler | None = None
        self._reading = Lock()
        """Held while the compiler is made."""
        self._closed = False
        self._begun: dict[SeqId, _Begun] = {}
        self._kept: list[tuple[StructuredOutputsParams, Grammar]] = []
        """Grammars that nobody uses, the one used last at the end."""
        self._compiling: ThreadPoolExecutor | None = None
        self._masking = MaskThreads()

    @property
    def is_preparing(self) -> bool:
        """See Gate: a tokenizer takes a busy machine longer than a grammar may."""
        return self._compiler is None or self._compiler.is_preparing

    def asks(self, source: EngineCoreRequest) -> bool:
        """See Gate."""
        return source.params.structured_outputs is not None

    def admit(self, request: Request) -> Refusal | None:
        """Begin to compile, or to wait for the request that has the same text."""
        wanted = wanted_of(request.source)
        assert request.seq not in self._begun, f"{request} is admitted twice"
        constraint: Future[Constraint] = Future()
        self._begun[request.seq] = begun = _Begun(wanted, constraint)
        begun.grammar = grammar = self._grammar_of(begun)
        forced = tuple(request.token_ids[request.num_prompt :])
        grammar.add_done_callback(lambda done: self._follow(request, done, forced, begun))
        return None

    def waits(self, request: Request) -> bool:
        """See Gate."""
        return self._begun[request.seq].waits

    def ready(self, request: Request) -> bool:
        """See Gate."""
        constraint = self._begun[request.seq].constraint
        return constraint.done() and constraint.exception() is None

    def failed(self, request: Request) -> Refusal | None:
        """See Gate."""
        begun = self._begun[request.seq]
        if not begun.constraint.done():
            return None
        error = begun.constraint.exception()
        if isinstance(error, NoCompiler):
            message, param = f"no structured output here: {error}", "structured_outputs"
            return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param=param)
        if isinstance(error, NotNow):
            field = f"structured_outputs.{wanted_of(request.source).kind}"
            return _not_now(field, f"{field} was not compiled: {error}")
        return None if error is None else self.refusal(request, str(error))

    def refusal(self, request: Request, words: str) -> Refusal:
        """A request whose grammar cannot be followed, by the field that the client wrote."""
        wanted = wanted_of(request.source)
        param, value = f"structured_outputs.{wanted.kind}", getattr(wanted, wanted.kind)
        error = InvalidParameter(param, value, words)
        return Refusal(code=RefusalCode.INVALID, message=str(error), param=error.param)

    def overdue(self, request: Request) -> Refusal:
        """See Gate: a text that no thread had time for may be right."""
        if self._begun[request.seq].waits:
            field = f"structured_outputs.{wanted_of(request.source).kind}"
            return _not_now(field, f"others were compiled for {self.seconds:g} s before {field}")
        return self.refusal(request, f"what compiles within {self.seconds:g} s, which it did not")

    def enter(self, request: Request) -> None:
        """See Gate."""
        request.constraint = self._begun[request.seq].constraint.result()

    def forked(self, parent: Request, child: Request) -> None:
        """See Gate."""
        assert parent.constraint is not None, "a request forks before its gate opened"
        child.constraint = parent.constraint.fork()

    def release(self, request: Request) -> None:
        """See Gate."""
        begun = self._begun.pop(request.seq, None)
        if begun is not None and begun.grammar is not None:
            begun.grammar.cancel()  # unless a thread has begun it
        constraint = request.constraint
        if constraint is None:
            return
        grammar = constraint.drop()
        if begun is not None and isinstance(grammar, Grammar):
            self._kept.append((begun.wanted, grammar))
            del self._kept[:-MAX_GRAMMARS]

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        self._masking.close()
        if self._compiling is not None:
            self._compiling.shutdown(wait=False, cancel_futures=True)
        with self._reading:
            self._closed = True
            if self._compiler is not None:
                self._compiler.close()

    def _grammar_of(self, begun: _Begun) -> Future[Grammar]:
        """A grammar that nobody uses, begun now where none is kept."""
        if self._compiling is None:
            self._compiling = ThreadPoolExecutor(self._num_threads, "grammar")
        for at, (kept, grammar) in enumerate(self._kept):
            if kept == begun.wanted:
                begun.waits, begun.reused = False, True
                del self._kept[at]
                made: Future[Grammar] = Future()
                made.set_result(grammar)
                return made
        return self._compiling.submit(self._compile, begun.wanted, begun.say_waits)

    def _compile(self, wanted: StructuredOutputsParams, waits: Waits = untold) -> Grammar:
        """In a thread."""
        waits(False)
        with self._reading:
            if self._closed:
                raise NotNow(_CLOSED)
            if self._compiler is None:
                self._compiler = self._make_compiler()
        return self._compiler.compile(wanted, waits)

    def _follow(
        self,
        request: Request,
        compiled: Future[Grammar],
        forced: tuple[int, ...],
        begun: _Begun,
    ) -> None:
        """Have a request's constraint made, its grammar being there. In the thread that compiled,
        or in the step loop."""
        if not self._masking.put(partial(self._constrain, request, compiled, forced, begun)):
            begun.constraint.set_exception(NotNow(_CLOSED))

    def _constrain(
        self,
        request: Request,
        compiled: Future[Grammar],
        forced: tuple[int, ...],
        begun: _Begun,
    ) -> None:
        """In a thread: what a request is to have; tokens that it came with are followed first."""
        if request.seq not in self._begun:
            return  # gone meanwhile
        into = begun.constraint
        try:
            make = self._reusing if begun.reused else self._constraint_of
            into.set_result(make(request, compiled.result(), forced))
        except CancelledError:
            into.set_exception(NotNow(_CLOSED))
        except BaseException as error:  # a library panics
            if not isinstance(error, GrammarError):
                logger.exception("a grammar could not be followed")
            into.set_exception(error)
        self._wake()

    def _reusing(self, request: Request, grammar: Grammar, forced: tuple[int, ...]) -> Constraint:
        """With a grammar that has followed other answers: none of them is to end this one."""
        wanted = wanted_of(request.source)

        def renew(tokens: Sequence[int]) -> Grammar:
            renewed = self._compile(wanted)
            renewed.accept((*forced, *tokens))
            return renewed

        try:
            grammar.reset()
            return self._constraint_of(request, grammar, forced, renew)
        except GrammarError:  # its last request ended with an error, or it is exhausted
            return self._constraint_of(request, self._compile(wanted), forced)

    def _constraint_of(
        self,
        request: Request,
        grammar: Grammar,
        forced: tuple[int, ...],
        renew: Renew | None = None,
    ) -> Constraint:
        source = request.source
        ends = () if source.params.ignore_eos else source.eos_token_ids
        if forced:
            grammar.accept(forced)
        mask = bytearray(4 * -(-self._vocab_size // 32))
        if not grammar.is_terminated:
            mask = make_mask(grammar, self._vocab_size, ends)
            if not forced and not any(first := make_mask(grammar, self._vocab_size, ())):
                raise GrammarError(_NO_ANSWER)
            if not forced:
                grammar.copy().accept((_lowest(first),))  # limits often show behind one token
        elif not forced:
            raise GrammarError(_NO_ANSWER)
        return Constraint(
            grammar,
            mask,
            vocab_size=self._vocab_size,
            ends=ends,
            threads=self._masking,
            wake=self._wake,
            refuse=partial(self.refusal, request),
            renew=renew,
        )


def structured_outputs(config: EngineConfig, wake: Callable[[], None]) -> StructuredOutputManager:
    """The gate of one engine; nothing is read before a request asks for structured output."""
    folder, vocab_size = Path(config.model.model), config.facts.vocab_size
    backend = config.structured_outputs.structured_outputs_backend
    return StructuredOutputManager(
        partial(make_compiler, backend, folder, vocab_size),
        vocab_size=vocab_size,
        threads=COMPILING_THREADS[backend],
        wake=wake,
    )


def _lowest(mask: bytearray) -> int:
    """Return the first token that ``mask`` allows; there is one."""
    at = next(index for index, byte in enumerate(mask) if byte)
    return 8 * at + (mask[at] & -mask[at]).bit_length() - 1


def _not_now(field: str, message: str) -> Refusal:
    return Refusal(code=RefusalCode.CAPACITY, message=message, param=field)


def wanted_of(source: EngineCoreRequest) -> StructuredOutputsParams:
    """What is compiled of a request that asks for structured output."""
    wanted = source.params.structured_outputs
    assert wanted is not None, "a request without structured outputs"
    return wanted
