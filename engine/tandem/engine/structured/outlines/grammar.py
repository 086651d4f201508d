"""Where one answer stands in a table of states; masks are made once for each state and kept."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from tandem.engine.structured.grammar import GrammarError
from tandem.engine.structured.outlines.tables import Tables
from tandem.engine.structured.outlines.vocabulary import Vocabulary

MASK_BYTES = 4 << 20
"""Masks of one automaton that are kept, together."""
_Before = tuple[int, "_Before | None"]
"""The state before the last token, and what was before that."""


class Automaton:
    """A table and a vocabulary: what all answers under one text share. Any number of threads."""

    def __init__(self, tables: Tables, vocabulary: Vocabulary) -> None:
        self.tables = tables
        self.vocabulary = vocabulary
        self._masks: dict[int, bytes] = {}
        self._lock = Lock()
        """Of ``_masks``; no mask is made while it is held."""

    @property
    def nbytes(self) -> int:
        """Memory that it takes or may take."""
        return self.tables.nbytes + MASK_BYTES

    def mask(self, state: int) -> bytes:
        """Tokens that may come at ``state``."""
        with self._lock:
            made = self._masks.get(state)
        if made is not None:
            return made
        made = self.vocabulary.mask(self.tables, state)
        with self._lock:
            if state not in self._masks and (len(self._masks) + 1) * len(made) > MASK_BYTES:
                del self._masks[next(iter(self._masks))]
            self._masks[state] = made
        return made

    def walk(self, state: int, text: bytes) -> int:
        """The state behind ``text``; 0 where it is not allowed."""
        after, columns = self.tables.after, self.tables.columns
        for byte in text:
            state = int(after[state, columns[byte]])
            if state == 0:
                break
        return state


class OutlinesGrammar:
    """Implements Grammar over an automaton. Copies share nothing that waits."""

    def __init__(self, automaton: Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.tables.initial
        self._before: _Before | None = None

    def accept(self, token_ids: Sequence[int]) -> None:
        """See Grammar."""
        tokens = self._automaton.vocabulary.tokens
        for token in token_ids:
            text = tokens[token] if 0 <= token < len(tokens) else b""
            state = self._automaton.walk(self._state, text) if text else 0
            if state == 0:
                raise GrammarError(f"another token than {token}, which is not allowed here")
            self._before = (self._state, self._before)
            self._state = state

    def fill(self, words: memoryview) -> None:
        """See Grammar."""
        mask = self._automaton.mask(self._state)
        words[:] = mask[: len(words)].ljust(len(words), b"\0")

    @property
    def is_accepting(self) -> bool:
        """See Grammar."""
        return bool(self._automaton.tables.accepting[self._state])

    @property
    def is_terminated(self) -> bool:
        """See Grammar."""
        return self.is_accepting and not self._automaton.tables.after[self._state].any()

    def rollback(self, num_tokens: int) -> None:
        """See Grammar."""
        for _ in range(num_tokens):
            if self._before is None:
                raise GrammarError(f"at most as many tokens as came, not {num_tokens}, taken back")
            self._state, self._before = self._before

    def reset(self) -> None:
        """See Grammar."""
        self._state, self._before = self._automaton.tables.initial, None

    def copy(self) -> OutlinesGrammar:
        """See Grammar."""
        other = OutlinesGrammar(self._automaton)
        other._state, other._before = self._state, self._before
        return other
