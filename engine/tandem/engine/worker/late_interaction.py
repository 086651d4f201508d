"""Scores of documents by the vectors of their tokens, against queries that are kept here.

MaxSim (ColBERT, Khattab & Zaharia 2020): for each token of the query its largest product with a
token of the document, summed. A query is kept until its number of documents were scored, or other
queries take its place. Called by ``Poolers`` with the pooled prompts of a step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.sample.transfer import index_on
from tandem.engine.step import SeqId
from tandem.protocol.pooling import LateInteractionMode, LateInteractionParams

MOST_BYTES = 64 << 20
"""Most bytes of all kept queries; the one used longest ago is dropped first."""


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
        """Return one float32 value of each prompt: of a query, kept from now on, its tokens; of a
        document its score, which is NaN if its query is not here."""
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
    with a token of the document.

    Args:
        query: float32 [tokens, values].
        documents: float32 [tokens, values] each, at least one token long.
    """
    lengths = index_on([len(each) for each in documents], query.device)
    products = torch.cat(tuple(documents)) @ query.T
    return torch.segment_reduce(products, "max", lengths=lengths, axis=0, unsafe=True).sum(1)
