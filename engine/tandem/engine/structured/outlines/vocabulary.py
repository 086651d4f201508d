"""The tokens of a model as a trie of bytes in arrays, so that one walk of it says which of them an
automaton allows.

A walk takes the trie's levels one after the other, all nodes of a level at once, or, once most are
dead, those below nodes that live: its time is bounded by the size of the trie, whatever the
automaton is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tandem.engine.structured.outlines.tables import Tables

Ints = npt.NDArray[np.int64]
MAX_TOKEN_BYTES = 1_024
"""Longer tokens are never allowed: each byte more is a level of every walk."""


class Vocabulary:
    """Tokens by their bytes. Nothing changes it; any number of threads."""

    def __init__(self, tokens: Sequence[bytes], size: int) -> None:
        """``tokens``: bytes by id, none where a token is no text; masks have ``size`` tokens, and
        those beyond ``tokens`` are never allowed."""
        self.tokens = tokens
        self.size = size
        self._bytes: list[npt.NDArray[np.uint8]] = []
        """Of each level's nodes, the byte that leads there."""
        self._parents: list[Ints] = []
        """Of each level's nodes, the node above."""
        self._children: list[Ints] = []
        """[nodes of the level above + 1]: where the children of each begin in the level."""
        self._starts: list[Ints] = []
        """[nodes of the level + 1]: where the tokens that end at each begin in ``_ids``."""
        self._ids: list[Ints] = []
        """Of the tokens that end at each level, by their nodes."""
        self._owners: list[Ints] = []
        """The node that each of them ends at."""
        self._build()

    def mask(self, tables: Tables, state: int) -> bytes:
        """Which tokens may come at ``state``: 4-byte words of 32 tokens each, the lowest bit the
        lowest id."""
        allowed = np.zeros(32 * -(-self.size // 32), np.bool_)
        cells, width, columns = tables.after.ravel(), tables.after.shape[1], tables.columns
        states = np.array([state], np.int32)
        level, depth = 0, len(self._bytes)
        while level < depth and 4 * np.count_nonzero(states) >= len(states):
            # Most nodes live: all of the level, dead ones with them.
            place = (states * width)[self._parents[level]] + columns[self._bytes[level]]
            states = cells[place]
            allowed[self._ids[level]] = states[self._owners[level]] != 0
            level += 1
        (nodes,) = states.nonzero()
        states = states[nodes]
        while level < depth and len(nodes):
            begins = self._children[level]
            below, owner = _ranges(begins[nodes], begins[nodes + 1])
            states = cells[states[owner] * width + columns[self._bytes[level][below]]]
            (lives,) = states.nonzero()
            nodes, states = below[lives], states[lives]
            begins = self._starts[level]
            ends, _ = _ranges(begins[nodes], begins[nodes + 1])
            allowed[self._ids[level][ends]] = True
            level += 1
        return np.packbits(allowed, bitorder="little").tobytes()

    def _build(self) -> None:
        """A level for each byte of the longest token: nodes are pairs of parent and byte."""
        left = [
            at
            for at, token in enumerate(self.tokens[: self.size])
            if 0 < len(token) <= MAX_TOKEN_BYTES
        ]
        ids = np.array(left, np.int64)
        lengths = np.array([len(self.tokens[at]) for at in left], np.int64)
        joined = np.frombuffer(b"".join(self.tokens[at] for at in left), np.uint8)
        begins = np.concatenate(([0], np.cumsum(lengths)))[:-1].astype(np.int64)
        parents, above, depth = np.zeros(len(ids), np.int64), 1, 0
        while len(ids):
            pairs = parents * 256 + joined[begins + depth]
            nodes, parents = np.unique(pairs, return_inverse=True)
            self._bytes.append((nodes % 256).astype(np.uint8))
            self._parents.append(nodes // 256)
            self._children.append(np.searchsorted(nodes // 256, np.arange(above + 1)))
            above, depth = len(nodes), depth + 1
            ending = lengths == depth
            order = np.argsort(parents[ending], kind="stable")
            self._ids.append(ids[ending][order])
            ordered = parents[ending][order]
            self._owners.append(ordered)
            self._starts.append(np.searchsorted(ordered, np.arange(above + 1)))
            rest = ~ending
            ids, lengths = ids[rest], lengths[rest]
            begins, parents = begins[rest], parents[rest]


def _ranges(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges ``begins`` to ``ends``, one range after the other, and the range
    that each is of."""
    sizes = ends - begins
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.cumsum(sizes) - sizes
    return np.arange(len(owner)) - before[owner] + begins[owner], owner
