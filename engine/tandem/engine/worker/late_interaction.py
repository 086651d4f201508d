"""Scores of documents by the vectors of their tokens, against queries that are kept here.

MaxSim (ColBERT, Khattab & Zaharia 2020): for each token of the query its best product with one of
the document, summed. A query is kept from its own request on until as many documents were scored as
it was kept for, or others push it out. Called by ``Poolers`` with what prompts of a step came to.
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
"""Of all kept queries together; the one that was used longest ago goes first."""


class TokenVectors(NamedTuple):
    """A prompt that ended, and what is wanted with it."""

    seq: SeqId
    params: LateInteractionParams
    vectors: Tensor
    """float32 [tokens, values]."""


@dataclass(slots=True)
class _Query:
    vectors: Tensor
    uses: int
    """Documents that are still to be scored."""


@dataclass(slots=True)
class LateInteractionRunner:
    """The queries that a rank keeps."""

    most_bytes: int = MOST_BYTES
    _queries: OrderedDict[str, _Query] = field(default_factory=OrderedDict)
    """By key, the one used longest ago first."""
    _held: int = 0
    """Bytes."""

    def __len__(self) -> int:
        return len(self._queries)

    def postprocess(self, ended: Sequence[TokenVectors]) -> list[tuple[SeqId, Tensor]]:
        """One float32 value of each prompt: of a query that is kept now its tokens, of a document
        its score, which is NaN where its query is not here."""
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
    """float32 [documents]: over the query's tokens, the sum of each one's best product with a token
    of the document.

    Args:
        query: float32 [tokens, values].
        documents: float32 [tokens, values] each, at least one token long.
    """
    lengths = index_on([len(each) for each in documents], query.device)
    products = torch.cat(tuple(documents)) @ query.T
    return torch.segment_reduce(products, "max", lengths=lengths, axis=0, unsafe=True).sum(1)
