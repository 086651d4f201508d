"""Constraint of one answer by a grammar.

A thread makes the next token's mask next to the step loop, so that a slow grammar delays its own
request only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from threading import Lock

from tandem.engine.structured.backends.base import Grammar
from tandem.engine.structured.errors import ExhaustedError, GrammarError
from tandem.protocol.errors import Refusal

logger = logging.getLogger(__name__)

Job = Callable[[], None]


class MaskThreads:
    """Threads for masks, started with the first job."""

    def __init__(self, count: int | None = None) -> None:
        """``count`` None is half of the processors, 2 to 8: masks are made without the
        interpreter's lock."""
        self._count = count or max(2, min(8, (os.cpu_count() or 2) // 2))
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def put(self, job: Job) -> bool:
        """Queue ``job``; return False after ``close``, without running it."""
        if not self._threads:
            self._start()
        if self._closed:
            return False
        self._jobs.put(job)
        return True

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)

    def _start(self) -> None:
        with self._lock:
            if self._threads or self._closed:
                return
            self._threads = [
                threading.Thread(target=self._run, name=f"grammar-mask-{index}", daemon=True)
                for index in range(self._count)
            ]
            for each in self._threads:
                each.start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None or self._closed:
                return
            try:
                job()
            except BaseException:  # a library's panic is not an Exception
                logger.exception("a job of a grammar failed")


Wake = Callable[[], None]
Renew = Callable[[Sequence[int]], Grammar]
"""Compiles a grammar again and appends these tokens. Raises GrammarError."""
Mask = bytes | bytearray
"""int32 words, 32 tokens each, lowest bit lowest id; 1 is allowed."""


class Constraint:
    """Constraint of one request, used by the step loop. Until ``is_ready`` a thread uses the
    grammar."""

    def __init__(
        self,
        grammar: Grammar,
        mask: Mask,
        *,
        vocab_size: int,
        ends: Collection[int],
        threads: MaskThreads,
        wake: Wake,
        refuse: Callable[[str], Refusal],
        renew: Renew | None = None,
    ) -> None:
        """``mask`` is of the next token. ``ends``: tokens that may end an answer if the grammar
        accepts it. ``refuse`` makes a refusal. ``renew`` is for a grammar used by other answers,
        and called at most once."""
        self._grammar = grammar
        self._mask: Mask | None = mask
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._threads = threads
        self._wake = wake
        self._refuse = refuse
        self._renew = renew
        self._tokens: list[int] = []
        """Tokens so far, if the grammar may have to be renewed."""
        self._exhausted = False
        """Whether the grammar did not take the last token."""
        self._making: Lock | None = None
        """Held until the mask has been made."""
        self._error: GrammarError | None = None
        self._calls = False
        """Whether the mask wakes the step loop."""
        self._starting = Lock()
        """Lock of the next two."""
        self._started = False
        """Whether a thread makes the mask."""
        self._dropped = False
        self._shares = False
        """Whether other choices have copies of the grammar."""

    @property
    def mask(self) -> Mask:
        assert self._mask is not None, "a token is drawn before its mask is made"
        return self._mask

    @property
    def is_dead(self) -> bool:
        return not any(self.mask)

    @property
    def is_terminated(self) -> bool:
        return self._grammar.is_terminated

    def is_ready(self, seconds: float = 0.0) -> bool:
        making = self._making
        if making is not None:
            waits = seconds > 0
            if not (making.acquire(timeout=seconds) if waits else making.acquire(False)):
                return False
            self._making, self._calls = None, False
        if self._error is not None:
            raise self._error
        return True

    def call_when_ready(self) -> None:
        self._calls = True

    def accept(self, token: int, *, last: bool = False) -> bool:
        """Append ``token`` to the answer; return whether it can only end now. Else begin the next
        mask, unless ``last``.

        Raises GrammarError if the mask does not allow it. If the grammar fails at an allowed token,
        ``is_ready`` raises the error.
        """
        if token in self._ends and self._grammar.is_accepting:
            return True
        if self._renew is not None:
            self._tokens.append(token)
        try:
            self._grammar.accept((token,))
            if self._grammar.is_terminated:
                return True
        except BaseException as error:  # a library's panic is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit) or not self._allows(token):
                raise
            if self._renew is not None and isinstance(error, ExhaustedError):
                self._exhausted = True  # renewed with the next mask, if any
            else:
                self._error = _as_grammar_error(error)
                return False
        self._mask = None
        if not last:
            self._making, self._started = Lock(), False
            self._making.acquire()
            self._threads.put(self._make)
        return False

    def _allows(self, token: int) -> bool:
        mask = self._mask
        return mask is not None and bool(mask[token // 8] >> token % 8 & 1)

    def ends_with(self, token: int) -> bool:
        if token in self._ends and self._grammar.is_accepting:
            return True
        after = self._grammar.copy()
        after.accept((token,))
        return after.is_terminated

    def fork(self) -> Constraint:
        self._shares = True
        forked = Constraint(
            self._grammar.copy(),
            self.mask,
            vocab_size=self._vocab_size,
            ends=self._ends,
            threads=self._threads,
            wake=self._wake,
            refuse=self._refuse,
            renew=self._renew,
        )
        forked._shares, forked._tokens = True, self._tokens.copy()
        return forked

    def refusal(self, words: str) -> Refusal:
        return self._refuse(words)

    def drop(self) -> bool:
        """End with the request, without a mask that no thread has begun; return whether nothing
        else uses the grammar."""
        with self._starting:
            self._dropped = True
            busy = self._making is not None and self._started and self._making.locked()
        return not (busy or self._shares)

    def _make(self) -> None:
        with self._starting:
            if self._dropped:
                return
            self._started = True
        making = self._making
        assert making is not None, "a mask is made that was not begun"
        try:
            self._mask = self._next_mask()
        except BaseException as error:  # a library's panic ends this request only
            self._error = _as_grammar_error(error)
        making.release()
        if self._calls:
            self._wake()

    def _next_mask(self) -> bytearray:
        if not self._exhausted:
            try:
                return make_mask(self._grammar, self._vocab_size, self._ends)
            except ExhaustedError:
                if self._renew is None:
                    raise
        renew, self._renew, self._exhausted = self._renew, None, False
        assert renew is not None, "exhausted by its own answer"
        self._grammar = renew(self._tokens)
        if self._grammar.is_terminated:
            return bytearray(4 * -(-self._vocab_size // 32))
        return make_mask(self._grammar, self._vocab_size, self._ends)


def _as_grammar_error(error: BaseException) -> GrammarError:
    if isinstance(error, GrammarError):
        return error
    logger.error("a grammar could not be followed", exc_info=error)
    return GrammarError(f"{type(error).__name__}: {error}")


def make_mask(grammar: Grammar, vocab_size: int, ends: Collection[int]) -> bytearray:
    """Return int32 words of the allowed tokens, with those that end the answer if it may end."""
    words = bytearray(4 * -(-vocab_size // 32))
    grammar.fill(memoryview(words))
    if ends:
        accepting = grammar.is_accepting
        for token in ends:
            if accepting:
                words[token // 8] |= 1 << token % 8
            else:
                words[token // 8] &= ~(1 << token % 8)
    return words
