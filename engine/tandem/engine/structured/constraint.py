"""One answer under a grammar, as the scheduler sees it: which token may come next, and what came.

The mask of the next token is made by a thread beside the step loop, so that a grammar that takes
long holds up nobody but its own request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Executor, Future

from tandem.engine.structured.grammar import Grammar, GrammarError
from tandem.protocol.errors import Refusal

Wake = Callable[[], None]


class Constraint:
    """Follows the tokens of one request. The step loop's, but for the mask that is being made:
    until it ``is_ready`` nothing is asked of the grammar."""

    def __init__(
        self,
        grammar: Grammar,
        mask: bytes,
        *,
        vocab_size: int,
        ends: Collection[int],
        threads: Executor,
        wake: Wake,
        refuse: Callable[[str], Refusal],
    ) -> None:
        """``mask`` is of the next token. ``ends``: tokens of the model that may end an answer where
        the grammar accepts it; none where it is not to end by them. ``refuse`` words a refusal.
        """
        self._grammar = grammar
        self._mask: bytes | None = mask
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)
        self._threads = threads
        self._wake = wake
        self._refuse = refuse
        self._making: Future[bytes] | None = None
        self._shares = False
        """Whether other choices have copies of the grammar."""

    @property
    def mask(self) -> bytes:
        """int32 words, 32 tokens each; the request is ready."""
        assert self._mask is not None, "a token is planned before its mask is made"
        return self._mask

    @property
    def is_dead(self) -> bool:
        """Whether no token may come next: the answer ends here. The request is ready."""
        return not any(self.mask)

    @property
    def is_terminated(self) -> bool:
        """Whether the answer so far can only end."""
        return self._grammar.is_terminated

    def is_ready(self, seconds: float = 0.0) -> bool:
        """Whether the next token's mask is made, waited for a little. Raises GrammarError."""
        if self._making is not None:
            try:
                self._mask = self._making.result(seconds)
            except TimeoutError:
                return False
            except CancelledError as error:
                raise GrammarError("the engine is closed") from error
            self._making = None
        return True

    def accept(self, token: int) -> bool:
        """The answer went on by ``token``; whether it can only end now. Otherwise the next mask is
        begun. Raises GrammarError."""
        if token in self._ends and self._grammar.is_accepting:
            return True
        self._grammar.accept((token,))
        if self._grammar.is_terminated:
            return True
        self._mask = None
        self._making = self._threads.submit(make_mask, self._grammar, self._vocab_size, self._ends)
        self._making.add_done_callback(lambda _: self._wake())
        return False

    def ends_with(self, token: int) -> bool:
        """Whether the answer could only end after ``token``. Raises GrammarError."""
        if token in self._ends and self._grammar.is_accepting:
            return True
        after = self._grammar.copy()
        after.accept((token,))
        return after.is_terminated

    def fork(self) -> Constraint:
        """Of another choice that stands here. The mask is made."""
        self._shares = True
        forked = Constraint(
            self._grammar.copy(),
            self.mask,
            vocab_size=self._vocab_size,
            ends=self._ends,
            threads=self._threads,
            wake=self._wake,
            refuse=self._refuse,
        )
        forked._shares = True
        return forked

    def refusal(self, words: str) -> Refusal:
        """How the request ends when its tokens cannot be followed further."""
        return self._refuse(words)

    def drop(self) -> Grammar | None:
        """The request is gone, and a mask that nobody began is not made. Its grammar, where nobody
        else uses it."""
        if self._making is not None and not self._making.cancel() and not self._making.done():
            return None
        return None if self._shares else self._grammar


def make_mask(grammar: Grammar, vocab_size: int, ends: Collection[int]) -> bytes:
    """int32 words of the tokens that may come next, ends among them where the answer may end."""
    words = bytearray(4 * -(-vocab_size // 32))
    grammar.fill(memoryview(words))
    accepting = grammar.is_accepting
    for token in ends:
        if accepting:
            words[token // 8] |= 1 << token % 8
        else:
            words[token // 8] &= ~(1 << token % 8)
    return bytes(words)
