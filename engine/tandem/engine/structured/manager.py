"""Gate of structured output: grammars are compiled next to the step loop.

One request uses a grammar at a time, as copies wait for each other. It is then kept for the same
form, and compiled again if answers exhaust its state. A backend is loaded with its first request.
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
from tandem.engine.config.structured_outputs import missing_package
from tandem.engine.request import Request
from tandem.engine.step import SeqId
from tandem.engine.structured.backends.base import Grammar, GrammarBackend
from tandem.engine.structured.constraint import Constraint, MaskThreads, Renew, make_mask
from tandem.engine.structured.errors import GrammarError, NoBackend, NotNow
from tandem.engine.structured.process import GrammarProcess, ProcessBackend
from tandem.protocol.errors import InvalidParameter, Refusal, RefusalCode
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.structured import BACKENDS, StructuredOutputsParams

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 10.0
"""Maximum seconds to wait for the turn to compile, and then for the compile."""
MAX_GRAMMARS = 32
"""Unused compiled grammars that are kept."""
_CLOSED = "the engine is closed"
_NO_ANSWER = "what has an answer: no text of a token or more matches"


@dataclass(slots=True)
class _Begun:
    """State of a request in the gate."""

    wanted: StructuredOutputsParams
    constraint: Future[Constraint]
    grammar: Future[Grammar] | None = None
    """Start of every answer."""
    reused: bool = False
    """Whether other answers have used it."""
    waits: bool = True
    """Whether other forms are compiled first; written by the thread that compiles."""


class StructuredOutputManager:
    """Gate that compiles grammars and makes constraints; for the step loop, except its threads."""

    seconds = COMPILE_SECONDS

    def __init__(
        self,
        make_backend: Callable[[str], GrammarBackend],
        *,
        vocab_size: int,
        default: str = "guidance",
        threads: int = 2,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """``make_backend`` is called in a thread at a name's first use, and raises GrammarError.
        ``default`` is the backend of requests without one. Each backend has ``threads``. ``wake``
        wakes the step loop from any thread."""
        self._make_backend = make_backend
        self._vocab_size = vocab_size
        self._default = default
        self._num_threads = threads
        self._wake = wake
        self._backends: dict[str, GrammarBackend] = {}
        self._making = {name: Lock() for name in BACKENDS}
        self._preparing: set[str] = set()
        self._closed = False
        self._begun: dict[SeqId, _Begun] = {}
        self._kept: list[tuple[StructuredOutputsParams, Grammar]] = []
        """Unused grammars, the one used last at the end."""
        self._compiling: dict[str, ThreadPoolExecutor] = {}
        """Threads that compile, by backend, so that a slow one delays no other."""
        self._masking = MaskThreads()

    @property
    def is_preparing(self) -> bool:
        """Return whether a tokenizer is loaded, which may take longer than a grammar may."""
        return not self._backends or bool(self._preparing)

    def asks(self, source: EngineCoreRequest) -> bool:
        return source.params.structured_outputs is not None

    def admit(self, request: Request) -> Refusal | None:
        wanted = wanted_of(request.source)
        assert request.seq not in self._begun, f"{request} is admitted twice"
        constraint: Future[Constraint] = Future()
        self._begun[request.seq] = begun = _Begun(wanted, constraint)
        begun.grammar = grammar = self._grammar_of(begun)
        forced = tuple(request.token_ids[request.num_prompt :])
        grammar.add_done_callback(lambda done: self._follow(request, done, forced, begun))
        return None

    def waits(self, request: Request) -> bool:
        return self._begun[request.seq].waits

    def ready(self, request: Request) -> bool:
        constraint = self._begun[request.seq].constraint
        return constraint.done() and constraint.exception() is None

    def failed(self, request: Request) -> Refusal | None:
        begun = self._begun[request.seq]
        if not begun.constraint.done():
            return None
        error = begun.constraint.exception()
        if isinstance(error, NoBackend):
            message, param = f"no structured output here: {error}", "structured_outputs.backend"
            return Refusal(code=RefusalCode.UNSUPPORTED, message=message, param=param)
        if isinstance(error, NotNow):
            field = f"structured_outputs.{wanted_of(request.source).kind}"
            return _not_now(field, f"{field} was not compiled: {error}")
        return None if error is None else self.refusal(request, str(error))

    def refusal(self, request: Request, words: str) -> Refusal:
        wanted = wanted_of(request.source)
        param, value = f"structured_outputs.{wanted.kind}", getattr(wanted, wanted.kind)
        error = InvalidParameter(param, value, words)
        return Refusal(code=RefusalCode.INVALID, message=str(error), param=error.param)

    def overdue(self, request: Request) -> Refusal:
        if self._begun[request.seq].waits:
            field = f"structured_outputs.{wanted_of(request.source).kind}"
            return _not_now(field, f"others were compiled for {self.seconds:g} s before {field}")
        return self.refusal(request, f"a format that compiles within {self.seconds:g} s")

    def enter(self, request: Request) -> None:
        request.constraint = self._begun[request.seq].constraint.result()

    def forked(self, parent: Request, child: Request) -> None:
        assert parent.constraint is not None, "a request forks before its gate opened"
        child.constraint = parent.constraint.fork()

    def release(self, request: Request) -> None:
        begun = self._begun.pop(request.seq, None)
        if begun is not None and begun.grammar is not None:
            begun.grammar.cancel()  # unless a thread has begun it
        constraint = request.constraint
        if constraint is None:
            return
        unused = constraint.drop()
        if unused and begun is not None and begun.grammar is not None:
            self._kept.append((begun.wanted, begun.grammar.result()))
            del self._kept[:-MAX_GRAMMARS]

    def close(self) -> None:
        self._closed = True
        self._masking.close()
        for threads in self._compiling.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for backend in [*self._backends.values()]:
            backend.close()

    def _grammar_of(self, begun: _Begun) -> Future[Grammar]:
        for at, (kept, grammar) in enumerate(self._kept):
            if kept == begun.wanted:
                begun.waits, begun.reused = False, True
                del self._kept[at]
                return _done(grammar)
        name = self._backend_of(begun.wanted)
        if name not in self._compiling:
            self._compiling[name] = ThreadPoolExecutor(self._num_threads, f"grammar-{name}")
        return self._compiling[name].submit(self._compile, begun)

    def _backend_of(self, wanted: StructuredOutputsParams) -> str:
        return wanted.backend or self._default

    def _compile(self, begun: _Begun) -> Grammar:
        begun.waits = False
        name = self._backend_of(begun.wanted)
        with self._making[name]:
            if self._closed:
                raise NotNow(_CLOSED)
            if name not in self._backends:
                self._prepare(name)
        return self._backends[name].compile(begun.wanted)

    def _prepare(self, name: str) -> None:
        self._preparing.add(name)
        try:
            self._backends[name] = backend = self._make_backend(name)
        finally:
            self._preparing.discard(name)
        if self._closed:
            backend.close()

    def _follow(
        self,
        request: Request,
        compiled: Future[Grammar],
        forced: tuple[int, ...],
        begun: _Begun,
    ) -> None:
        if not self._masking.put(partial(self._constrain, request, compiled, forced, begun)):
            begun.constraint.set_exception(NotNow(_CLOSED))

    def _constrain(
        self,
        request: Request,
        compiled: Future[Grammar],
        forced: tuple[int, ...],
        begun: _Begun,
    ) -> None:
        if request.seq not in self._begun:
            return  # ended meanwhile
        into = begun.constraint
        try:
            compiled.result()
            make = self._reusing if begun.reused else self._constraint_of
            into.set_result(make(request, begun, forced))
        except CancelledError:
            into.set_exception(NotNow(_CLOSED))
        except BaseException as error:  # a library's panic is not an Exception
            if not isinstance(error, GrammarError):
                logger.exception("a grammar could not be followed")
            into.set_exception(error)
        self._wake()

    def _reusing(self, request: Request, begun: _Begun, forced: tuple[int, ...]) -> Constraint:
        def renew(tokens: Sequence[int]) -> Grammar:
            begun.grammar = _done(self._compile(begun))
            renewed = begun.grammar.result().copy()
            renewed.accept((*forced, *tokens))
            return renewed

        try:
            return self._constraint_of(request, begun, forced, renew)
        except GrammarError:  # it is exhausted
            begun.grammar = _done(self._compile(begun))
            return self._constraint_of(request, begun, forced)

    def _constraint_of(
        self,
        request: Request,
        begun: _Begun,
        forced: tuple[int, ...],
        renew: Renew | None = None,
    ) -> Constraint:
        assert begun.grammar is not None
        source, grammar = request.source, begun.grammar.result().copy()
        ends = () if source.params.ignore_eos else source.eos_token_ids
        if forced:
            grammar.accept(forced)
        mask = bytearray(4 * -(-self._vocab_size // 32))
        if not grammar.is_terminated:
            mask = make_mask(grammar, self._vocab_size, ends)
            if not forced and not any(first := make_mask(grammar, self._vocab_size, ())):
                raise GrammarError(_NO_ANSWER)
            if not forced:
                grammar.copy().accept((_lowest(first),))  # limits often show after one token
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
    """Return the gate of one engine; nothing is read before the first request."""
    folder, vocab_size = Path(config.model.model), config.facts.vocab_size
    process = GrammarProcess(folder, vocab_size)

    def make_backend(name: str) -> GrammarBackend:
        if missing := missing_package(name):
            raise NoBackend(missing)
        if name != "guidance":
            return ProcessBackend(name, process)
        try:
            from tandem.engine.structured.backends.guidance import GuidanceBackend
        except ImportError as error:
            raise NoBackend(str(error)) from error
        return GuidanceBackend(folder, vocab_size)

    return StructuredOutputManager(
        make_backend,
        vocab_size=vocab_size,
        default=config.structured_outputs.structured_outputs_backend,
        wake=wake,
    )


def _done(grammar: Grammar) -> Future[Grammar]:
    made: Future[Grammar] = Future()
    made.set_result(grammar)
    return made


def _lowest(mask: bytearray) -> int:
    at = next(index for index, byte in enumerate(mask) if byte)
    return 8 * at + (mask[at] & -mask[at]).bit_length() - 1


def _not_now(field: str, message: str) -> Refusal:
    return Refusal(code=RefusalCode.CAPACITY, message=message, param=field)


def wanted_of(source: EngineCoreRequest) -> StructuredOutputsParams:
    """Return the form of a request with structured output."""
    wanted = source.params.structured_outputs
    assert wanted is not None, "a request without structured outputs"
    return wanted
