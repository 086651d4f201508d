"""Vectors and scores of pooled prompts.

All rows of a step are pooled at once. Sums of unfinished prompts stay on the device in float32;
none of such a prompt comes from the prefix cache.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from tandem.engine.sample.transfer import index_on, on_device
from tandem.engine.step import NewSequence, SeqId
from tandem.protocol.pooling import (
    LateInteractionMode,
    LateInteractionParams,
    PoolingParams,
    PoolingTask,
    PoolingType,
)

MOST_BYTES = 64 << 20
"""Maximum bytes of all kept queries; the one used longest ago is dropped first."""


class TokenVectors(NamedTuple):
    """Token vectors of a prompt that ended, and its parameters."""

    seq: SeqId
    params: LateInteractionParams
    vectors: Tensor
    """float32 [tokens, values]."""


@dataclass(slots=True)
class _Query:
    vectors: Tensor
    uses: int
    """Documents still to be scored."""


@dataclass(slots=True)
class LateInteractionRunner:
    """Queries kept by a rank."""

    most_bytes: int = MOST_BYTES
    _queries: OrderedDict[str, _Query] = field(default_factory=OrderedDict)
    """Queries by key, the one used longest ago first."""
    _held: int = 0
    """Bytes."""

    def __len__(self) -> int:
        return len(self._queries)

    def postprocess(self, ended: Sequence[TokenVectors]) -> list[tuple[SeqId, Tensor]]:
        """Return one float32 value of each prompt: a query's number of tokens, a document's score;
        NaN without its query."""
        made: list[tuple[SeqId, Tensor]] = []
        documents: dict[str, list[TokenVectors]] = {}
        for each in ended:
            if each.params.mode is LateInteractionMode.SCORE_DOC:
                documents.setdefault(each.params.query_key, []).append(each)
                continue
            self._keep(each)
            made.append((each.seq, each.vectors.new_full((1,), len(each.vectors))))
        for key, group in documents.items():
            scores = self._scores(key, [each.vectors for each in group])
            made += [(each.seq, scores[index, None]) for index, each in enumerate(group)]
        return made

    def _keep(self, query: TokenVectors) -> None:
        self._forget(query.params.query_key)
        size = query.vectors.nbytes
        while self._queries and self._held + size > self.most_bytes:
            self._forget(next(iter(self._queries)))
        kept = _Query(query.vectors.clone(), query.params.query_uses)
        self._queries[query.params.query_key] = kept
        self._held += size

    def _scores(self, key: str, documents: Sequence[Tensor]) -> Tensor:
        query = self._queries.get(key)
        if query is None:
            return documents[0].new_full((len(documents),), math.nan)
        self._queries.move_to_end(key)
        query.uses -= len(documents)
        if query.uses <= 0:
            self._forget(key)
        return maxsim(query.vectors, documents)

    def _forget(self, key: str) -> None:
        gone = self._queries.pop(key, None)
        if gone is not None:
            self._held -= gone.vectors.nbytes


def maxsim(query: Tensor, documents: Sequence[Tensor]) -> Tensor:
    """Return float32 [documents]: the sum over the query's tokens of each one's largest product
    with the document.

    ``query`` is float32 [tokens, values], ``documents`` likewise, each at least one token long.
    """
    lengths = index_on([len(each) for each in documents], query.device)
    products = torch.cat(tuple(documents)) @ query.T
    return torch.segment_reduce(products, "max", lengths=lengths, axis=0, unsafe=True).sum(1)


_LAST, _MEAN, _CLS, _TOKENS = 1, 2, 3, 4
_KINDS = {PoolingType.LAST: _LAST, PoolingType.MEAN: _MEAN, PoolingType.CLS: _CLS}

Index = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Head(Protocol):
    """Heads of the model for scores and token vectors: see CausalModel."""

    def classify(self, hidden: Tensor) -> Tensor: ...

    def probabilities(self, scores: Tensor) -> Tensor: ...

    def token_vectors(self, hidden: Tensor) -> Tensor: ...


class StepColumns(Protocol):
    """A step's rows, an entry each: see ``StepRows``."""

    @property
    def index(self) -> Index: ...

    @property
    def first(self) -> Index: ...

    @property
    def counts(self) -> Index: ...

    @property
    def ends(self) -> Index:
        """Return the last token of each row, among the step's."""
        ...


class PoolingCursor(NamedTuple):
    """Position of a step in the pooled prompts, one entry per row."""

    first: Index
    """Position of the row's first token: 0 if its prompt begins."""
    counts: Index
    """Tokens whose hidden states are pooled."""
    is_finished: Flags
    """Whether the prompt ends with the step."""


@dataclass(frozen=True, slots=True)
class PoolingMetadata:
    """Rows of a step that contribute to vectors or scores."""

    rows: Index
    cursor: PoolingCursor
    tokens: Index
    """Tokens of the step, row by row."""


@dataclass(frozen=True, slots=True)
class PooledStep:
    """Results of the prompts that ended in a step, being copied to the host."""

    vectors: Tensor | None = None
    """float32 [rows, hidden]."""
    vector_seqs: tuple[tuple[SeqId, int], ...] = ()
    """Sequence of each row, and the number of its values to use."""
    scores: Tensor | None = None
    """float32 [rows, labels]."""
    score_seqs: tuple[SeqId, ...] = ()
    of_tokens: tuple[tuple[SeqId, list[Tensor]], ...] = ()
    """Vectors, float32 [tokens, values], by chunk, of prompts whose every token has one; of late
    interaction one value."""

    def as_bytes(self) -> dict[SeqId, bytes]:
        """Return little-endian values by sequence; call once they are on the host."""
        found = {}
        if self.vectors is not None:
            table = _little(self.vectors)
            for row, (seq, dims) in enumerate(self.vector_seqs):
                found[seq] = table[row, :dims].tobytes()
        if self.scores is not None:
            table = _little(self.scores)
            for row, seq in enumerate(self.score_seqs):
                found[seq] = table[row].tobytes()
        for seq, chunks in self.of_tokens:
            found[seq] = b"".join(_little(chunk).tobytes() for chunk in chunks)
        return found


def _little(values: Tensor) -> NDArray[np.float32]:
    assert values.dtype == torch.float32
    return values.numpy().astype("<f4", copy=False)


@dataclass(slots=True)
class Poolers:
    """Pooled sequences of a rank; falsy if there are none."""

    capacity: int
    num_pooled: int = 0
    _kinds: NDArray[np.int8] = field(init=False)
    """0 for rows that are not pooled."""
    _columns: NDArray[np.int64] = field(init=False)
    """[5, rows]: sequence, prompt tokens, values of a vector, and two flags."""
    _states: Tensor | None = None
    """Sums of unfinished prompts, float32 [rows, hidden]."""
    _chunks: dict[SeqId, list[Tensor]] = field(default_factory=dict)
    """Token vectors of unfinished prompts, on the host unless for late interaction."""
    late: LateInteractionRunner = field(default_factory=LateInteractionRunner)
    _late_params: dict[SeqId, LateInteractionParams] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._kinds = np.zeros(self.capacity, dtype=np.int8)
        self._columns = np.zeros((5, self.capacity), dtype=np.int64)

    def __bool__(self) -> bool:
        return self.num_pooled > 0

    def add(self, row: int, new: NewSequence) -> None:
        params = new.pooling
        assert params is not None
        assert params.pooling_type is not None, "the plan resolves what is left open"
        self.num_pooled += 1
        by_token = params.task == PoolingTask.TOKEN_EMBED
        self._kinds[row] = _TOKENS if by_token else _KINDS[params.pooling_type]
        if params.late_interaction is not None:
            self._late_params[new.seq] = params.late_interaction
        self._columns[:, row] = (new.seq, new.num_prompt, *_asked(params))

    def drop(self, row: int, seq: SeqId) -> None:
        self.num_pooled -= 1
        self._kinds[row] = 0
        self._chunks.pop(seq, None)
        self._late_params.pop(seq, None)

    def metadata(self, step: StepColumns) -> PoolingMetadata | None:
        """Return the rows that contribute in a step; None if there are none."""
        kinds = self._kinds[step.index]
        is_finished = step.first + step.counts == self._columns[1, step.index]
        # np.select would be slow.
        counts = np.where(kinds > 0, step.counts, 0)
        counts = np.where(kinds == _CLS, step.first == 0, counts)
        counts = np.where(kinds == _LAST, is_finished, counts)
        at = np.flatnonzero((counts > 0) | ((kinds > 0) & is_finished))
        if not at.size:
            return None
        starts = np.where(kinds == _LAST, step.ends, step.ends + 1 - step.counts)[at]
        counts = counts[at]
        within = np.arange(counts.sum(), dtype=np.int64)
        within -= np.repeat(np.cumsum(counts) - counts, counts)
        cursor = PoolingCursor(step.first[at], counts, is_finished[at])
        return PoolingMetadata(step.index[at], cursor, np.repeat(starts, counts) + within)

    def pool(self, wanted: PoolingMetadata, hidden: Tensor, head: Head) -> PooledStep:
        """Return the results of the prompts that end.

        ``hidden`` is [tokens, hidden], the states of ``wanted.tokens``.
        """
        by_token = self._kinds[wanted.rows] == _TOKENS
        if not by_token.any():
            return self._vectors(wanted.rows, wanted.cursor, hidden, head)
        counts = wanted.cursor.counts
        of_tokens = self._of_tokens(wanted, by_token, hidden, head)
        if by_token.all():
            return PooledStep(of_tokens=of_tokens)
        own = hidden[index_on(np.flatnonzero(np.repeat(~by_token, counts)), hidden.device)]
        cursor = PoolingCursor(*(each[~by_token] for each in wanted.cursor))
        made = self._vectors(wanted.rows[~by_token], cursor, own, head)
        return PooledStep(
            made.vectors, made.vector_seqs, made.scores, made.score_seqs, of_tokens=of_tokens
        )

    def _vectors(
        self, rows: Index, cursor: PoolingCursor, hidden: Tensor, head: Head
    ) -> PooledStep:
        device = hidden.device
        sums = hidden.float()
        if (cursor.counts != 1).any():
            lengths = index_on(cursor.counts, device)
            sums = torch.segment_reduce(sums, "sum", lengths=lengths, axis=0, unsafe=True)
        kinds, ends = self._kinds[rows], cursor.is_finished
        resumed = np.flatnonzero((kinds != _LAST) & (cursor.first > 0))
        if resumed.size:
            assert self._states is not None
            known = self._states.index_select(0, index_on(rows[resumed], device))
            sums = sums.index_add(0, index_on(resumed, device), known)
        going_on = np.flatnonzero(~ends)
        if going_on.size:
            self._keep(rows[going_on], sums.index_select(0, index_on(going_on, device)))
            if going_on.size == len(rows):
                return PooledStep()
            sums = sums.index_select(0, index_on(np.flatnonzero(ends), device))
            rows, kinds = rows[ends], kinds[ends]
        if (kinds == _MEAN).any():
            over = np.where(kinds == _MEAN, self._columns[1, rows], 1)
            sums = sums / index_on(over, device)[:, None]
        return self._answers(rows, sums, head)

    def _answers(self, rows: Index, states: Tensor, head: Head) -> PooledStep:
        """Return the requested results of prompts that end; ``states``: float32 [rows, hidden]."""
        seqs, _, dims, lengthless, active = self._columns[:, rows]
        scored = dims == 0
        if not scored.any():
            vectors = _embeddings(states, dims, lengthless == 0)
            return PooledStep(_to_host(vectors), tuple(zip(seqs.tolist(), dims.tolist())))  # noqa: B905
        at = np.flatnonzero(scored)
        scores = head.classify(states.index_select(0, index_on(at, states.device)))
        scores = _where(active[at] > 0, scores, head.probabilities)
        seq_ids = tuple(SeqId(seq) for seq in seqs[at].tolist())
        if scored.all():
            return PooledStep(scores=_to_host(scores), score_seqs=seq_ids)
        rest = np.flatnonzero(~scored)
        own = states.index_select(0, index_on(rest, states.device))
        vectors = _embeddings(own, dims[rest], lengthless[rest] == 0)
        names = tuple(zip(seqs[rest].tolist(), dims[rest].tolist()))  # noqa: B905
        return PooledStep(_to_host(vectors), names, _to_host(scores), seq_ids)

    def _of_tokens(
        self, wanted: PoolingMetadata, by_token: Flags, hidden: Tensor, head: Head
    ) -> tuple[tuple[SeqId, list[Tensor]], ...]:
        rows, cursor = wanted.rows, wanted.cursor
        counts = cursor.counts
        token_rows = np.repeat(rows, counts)
        _, _, dims, lengthless, _ = self._columns[:, token_rows]
        own = np.repeat(by_token, counts)
        states = hidden[index_on(np.flatnonzero(own), hidden.device)].float()
        made = _embeddings(head.token_vectors(states), dims[own], lengthless[own] == 0)
        late_alone = bool(self._late_params) and self._late_params.keys() >= set(
            self._columns[0, rows[by_token]].tolist()
        )
        on_host = made if late_alone else _to_host(made)
        ended: list[tuple[SeqId, list[Tensor]]] = []
        kept_here: list[TokenVectors] = []
        at = 0
        for row, count, first, ends in zip(
            rows[by_token].tolist(),
            counts[by_token].tolist(),
            cursor.first[by_token].tolist(),
            cursor.is_finished[by_token].tolist(),
            strict=True,
        ):
            seq, values = SeqId(int(self._columns[0, row])), int(self._columns[2, row])
            late = self._late_params.get(seq)
            chunk = (on_host if late is None else made)[at : at + count, :values]
            at += count
            chunks = [chunk] if first == 0 else [*self._chunks.pop(seq), chunk]
            if not ends:
                self._chunks[seq] = chunks
            elif late is None:
                ended.append((seq, chunks))
            else:
                kept_here.append(TokenVectors(seq, late, torch.cat(chunks)))
        ended += [(seq, [_to_host(value)]) for seq, value in self.late.postprocess(kept_here)]
        return tuple(ended)

    def _keep(self, rows: Index, states: Tensor) -> None:
        if self._states is None:
            self._states = torch.zeros(self.capacity, states.shape[1], device=states.device)
        self._states.index_copy_(0, index_on(rows, states.device), states)


def _asked(params: PoolingParams) -> tuple[int, int, int]:
    """Return the values of a vector (0: scores), whether its length is kept, and the activation."""
    if params.task == PoolingTask.CLASSIFY:
        return 0, 0, int(bool(params.activation))
    assert params.dimensions is not None, "the plan resolves what is left open"
    return params.dimensions, int(not params.normalize), 0


def _embeddings(states: Tensor, dims: Index, normalized: Flags) -> Tensor:
    """Return float32 [rows, hidden]: zero from each row's ``dims`` on, maybe normalized."""
    if (dims < states.shape[1]).any():
        places = torch.arange(states.shape[1], device=states.device)
        states = states.masked_fill(places >= index_on(dims, states.device)[:, None], 0.0)
    return _where(normalized, states, lambda each: normalize(each, dim=1))


def _where(flags: Flags, values: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    if flags.all():
        return made(values)
    if not flags.any():
        return values
    chosen = on_device(torch.from_numpy(flags), values.device)[:, None]
    return torch.where(chosen, made(values), values)


def _to_host(values: Tensor) -> Tensor:
    return values.to("cpu", non_blocking=True)
