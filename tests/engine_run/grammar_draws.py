"""Answers drawn at random under a grammar, without a model: fast, and of every shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem.engine.structured.backends.base import Grammar, GrammarBackend
from tandem.engine.structured.constraint import make_mask
from tandem.protocol.structured import StructuredOutputsParams
from tandem.text.tokenizer import Tokenizer

VOCAB = 49152
MOST_TOKENS = 400
PATIENCE = 24
"""Tokens after which what closes is preferred: else most texts would never end."""


def compiled(compiler: GrammarBackend, **fields: Any) -> Grammar:
    """The grammar of a ``structured_outputs`` that is verified."""
    wanted = StructuredOutputsParams(**fields)
    wanted.verify()
    return compiler.compile(wanted)


@dataclass
class Drawer:
    """Draws answers in the tokens of one vocabulary."""

    tokenizer: Tokenizer
    _short: npt.NDArray[np.bool_] = field(init=False)
    _closing: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        texts = [self.tokenizer.decode([token]) for token in range(VOCAB)]
        self._short = np.array([len(text) <= 2 for text in texts])
        self._closing = np.array(
            [bool(text) and not text.strip('"}],0123456789') for text in texts]
        )

    def drawn(self, grammar: Grammar, seed: int) -> str | None:
        """An answer of random allowed tokens, half of them short; None if it did not end in
        time."""
        rng, ids = np.random.default_rng(seed), list[int]()
        while len(ids) < MOST_TOKENS and not grammar.is_terminated:
            words = np.frombuffer(make_mask(grammar, VOCAB, ()), np.uint8)
            allowed = np.unpackbits(words, bitorder="little")[:VOCAB].astype(bool)
            if not allowed.any() or (grammar.is_accepting and rng.random() < 0.5):
                break
            if rng.random() < 0.5:
                allowed = _preferred(allowed, self._short)
            if len(ids) > PATIENCE:
                allowed = _preferred(allowed, self._closing)
            token = int(rng.choice(np.flatnonzero(allowed)))
            grammar.accept([token])
            ids.append(token)
        ended = grammar.is_terminated or grammar.is_accepting
        return self.tokenizer.decode(ids, skip_special_tokens=False) if ended else None


def _preferred(
    allowed: npt.NDArray[np.bool_], those: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    both = allowed & those
    return both if both.any() else allowed
