"""Scores by late interaction: a query's token vectors stay at a worker, which scores documents.

No vector is sent. A query is one request and each document another, under a random key that sends
all of them to one worker. If the worker dropped the query, or another worker took its place, a
document's answer is NaN. Then both are requested again. Used by ``scoring``.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from tandem.llm.outputs import PooledRequestOutput, ScoringOutput, ScoringRequestOutput
from tandem.llm.prepared import PreparedRequest
from tandem.protocol.errors import FailCause, RequestFailed
from tandem.protocol.pooling import LateInteractionMode, LateInteractionParams, PoolingParams
from tandem.protocol.pooling import PoolingTask as Task

Pool = Callable[[Sequence[PreparedRequest]], Awaitable[list[PooledRequestOutput]]]
"""Function that returns the outputs of prepared requests, in order."""

QUERIES_AT_ONCE = 32
"""Number of queries of one call that workers keep at a time."""
MOST_ROUNDS = 4
"""Maximum number of requests for a document until its query is found."""


def new_key() -> str:
    """Return a random key for a query."""
    return secrets.token_hex(16)


def asked(mode: LateInteractionMode, key: str) -> PoolingParams:
    """Return the parameters of a query's or a document's request."""
    late = LateInteractionParams(mode=mode, query_key=key)
    return PoolingParams(task=Task.TOKEN_EMBED, normalize=True, late_interaction=late)


@dataclass(frozen=True, slots=True)
class LateScores:
    """Pairs of queries and documents that passed every check."""

    queries: tuple[PreparedRequest, ...]
    documents: tuple[PreparedRequest, ...]
    query_of: tuple[int, ...]
    """Index of each document's query."""

    async def scores(
        self, pool: Pool
    ) -> tuple[list[ScoringRequestOutput], list[PooledRequestOutput]]:
        """Return a score for each document, and all outputs, queries first."""
        queries: list[PooledRequestOutput] = []
        documents: dict[int, PooledRequestOutput] = {}
        for at in range(0, len(self.queries), QUERIES_AT_ONCE):
            part = range(at, min(at + QUERIES_AT_ONCE, len(self.queries)))
            open_ones = [each for each, query in enumerate(self.query_of) if query in part]
            kept = await self._keep(open_ones, pool)
            queries += [kept[query] for query in part]
            documents |= await self._scored(open_ones, pool)
        ordered = [documents[each] for each in range(len(self.documents))]
        scores = [
            _score(queries[query], output)
            for query, output in zip(self.query_of, ordered, strict=True)
        ]
        return scores, [*queries, *ordered]

    async def _scored(self, wanted: list[int], pool: Pool) -> dict[int, PooledRequestOutput]:
        found: dict[int, PooledRequestOutput] = {}
        for _ in range(MOST_ROUNDS):
            outputs = await pool([self.documents[each] for each in wanted])
            found |= dict(zip(wanted, outputs, strict=True))
            wanted = [each for each in wanted if math.isnan(found[each].floats[0])]
            if not wanted:
                return found
            await self._keep(wanted, pool)
        message = "no worker kept the query until its documents were scored"
        raise RequestFailed(FailCause.INTERNAL, message)

    async def _keep(self, documents: list[int], pool: Pool) -> dict[int, PooledRequestOutput]:
        """Have workers keep the queries of ``documents``. Return the outputs by query."""
        uses = Counter(self.query_of[each] for each in documents)
        requests = [_for_uses(self.queries[query], count) for query, count in uses.items()]
        return dict(zip(uses, await pool(requests), strict=True))


def _for_uses(query: PreparedRequest, count: int) -> PreparedRequest:
    request = query.processed.request
    assert request.pooling is not None, "queries are asked for with a way to keep them"
    assert request.pooling.late_interaction is not None, "queries are asked for with a way to keep"
    late = msgspec.structs.replace(request.pooling.late_interaction, query_uses=count)
    pooling = msgspec.structs.replace(request.pooling, late_interaction=late)
    request = msgspec.structs.replace(request, pooling=pooling)
    return replace(query, processed=replace(query.processed, request=request))


def _score(query: PooledRequestOutput, document: PooledRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        prompt_token_ids=[*query.prompt_token_ids, *document.prompt_token_ids],
        outputs=ScoringOutput(document.floats[0]),
        num_cached_tokens=query.num_cached_tokens + document.num_cached_tokens,
    )
