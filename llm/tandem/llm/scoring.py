"""Similarity of two texts: a number of the model's head, or the cosine of two vectors.

A classifier with one label reads both texts as one prompt. Other models give a vector for each
text, or for each token (late interaction).
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Coroutine,
    Sequence,
)
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, TypeVar

import msgspec

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.outputs import PooledRequestOutput, ScoringOutput, ScoringRequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.protocol.context import ORDINARY, RequestContext
from tandem.protocol.errors import FailCause, InvalidParameter, RequestFailed
from tandem.protocol.pooling import (
    LateInteractionMode,
    LateInteractionParams,
    PoolingParams,
    PoolingTask,
)
from tandem.protocol.pooling import (
    PoolingTask as Task,
)
from tandem.text.input_processor import InputOptions, TruncationSide, tokens_kept
from tandem.text.prompts import TextPrompt, TokensPrompt

Pool = Callable[[Sequence[PreparedRequest]], Awaitable[list[PooledRequestOutput]]]
"""Function that returns the outputs of prepared requests, in order."""

QUERIES_AT_ONCE = 32
"""Maximum number of queries of one call that workers keep at once."""
MOST_ROUNDS = 4
"""Maximum requests for a document until its query is found."""


def new_key() -> str:
    """Return a random key for a query."""
    return secrets.token_hex(16)


def asked(mode: LateInteractionMode, key: str) -> PoolingParams:
    """Return the parameters of a query's or a document's request."""
    late = LateInteractionParams(mode=mode, query_key=key)
    return PoolingParams(task=Task.TOKEN_EMBED, normalize=True, late_interaction=late)


@dataclass(frozen=True, slots=True)
class LateScores:
    """Checked pairs of queries and documents."""

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
        """Make workers keep the queries of ``documents``. Return the outputs by query."""
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


_Answer = TypeVar("_Answer")

_VECTOR = PoolingParams(normalize=True)


@dataclass(frozen=True, slots=True)
class Side:
    """Texts on one side of the pairs, and their parameter."""

    texts: Sequence[str]
    param: str
    is_list: bool = True
    """Whether errors name a text by its index."""

    def name(self, index: int) -> str:
        return f"{self.param}[{index}]" if self.is_list else self.param


@dataclass(frozen=True, slots=True)
class PreparedScores:
    """Checked pairs."""

    requests: tuple[PreparedRequest, ...]
    pairs: tuple[tuple[int, ...], ...]
    """Requests of each score: one, or two to compare."""

    async def scores(
        self, pool: Pool
    ) -> tuple[list[ScoringRequestOutput], list[PooledRequestOutput]]:
        """Return a score for each pair, and the outputs of ``requests``."""
        outputs = await pool(self.requests)
        vectors = [each.floats for each in outputs]
        found = []
        for pair in self.pairs:
            first, last = vectors[pair[0]], vectors[pair[-1]]
            score = first[0] if len(pair) == 1 else sum(map(mul, first, last))
            parts = [outputs[index] for index in pair]
            found.append(
                ScoringRequestOutput(
                    prompt_token_ids=[token for part in parts for token in part.prompt_token_ids],
                    outputs=ScoringOutput(score),
                    num_cached_tokens=sum(part.num_cached_tokens for part in parts),
                )
            )
            await asyncio.sleep(0)  # products of long vectors take long
        return found, outputs


async def prepare_scores(
    llm: AsyncLLM,
    first: Side,
    second: Side,
    *,
    options: InputOptions | None = None,
    activation: bool | None = None,
) -> PreparedScores | LateScores:
    """Return the requests that score each pair: one text with each of ``second``, or pair by pair.

    ``activation`` False returns the head's own number. Raises InvalidParameter.
    """
    count = len(second.texts)
    if len(first.texts) not in (1, count) or not count:
        allowed = f"one text, or as many as in {second.param}, which has {count}"
        raise InvalidParameter(first.param, f"{len(first.texts)} texts", allowed)
    pooling = (await llm.card()).pooling
    labels = () if pooling is None else pooling.labels
    if len(labels) > 1:
        allowed = "a model that embeds, or has one label: a score is one number"
        raise InvalidParameter("model", f"{len(labels)} labels", allowed)
    places = [(0 if len(first.texts) == 1 else index, index) for index in range(count)]
    if labels:
        params = PoolingParams(task=PoolingTask.CLASSIFY, activation=activation)
        typed = pooling is not None and pooling.has_token_types
        return await _by_head(llm, first, second, places, options, params, typed=typed)
    if activation is not None:
        raise InvalidParameter("activation", activation, "leave it out: this model has no head")
    if pooling is not None and pooling.token_values is not None:
        return await _by_late_interaction(llm, first, second, places, options)
    return await _by_vectors(llm, first, second, places, options)


async def _by_late_interaction(
    llm: AsyncLLM,
    first: Side,
    second: Side,
    places: Sequence[tuple[int, int]],
    options: InputOptions | None,
) -> LateScores:
    keys = [new_key() for _ in first.texts]

    async def prepared(side: Side, index: int, params: PoolingParams) -> PreparedRequest:
        await asyncio.sleep(0)  # let others run
        prompt, name = TextPrompt(side.texts[index]), side.name(index)
        return await llm.prepare_pooling(prompt, params, options=options, param=name)

    keep, score = LateInteractionMode.CACHE_QUERY, LateInteractionMode.SCORE_DOC
    queries = [await prepared(first, one, asked(keep, key)) for one, key in enumerate(keys)]
    documents = [await prepared(second, two, asked(score, keys[one])) for one, two in places]
    return LateScores(tuple(queries), tuple(documents), tuple(one for one, _ in places))


async def _by_head(
    llm: AsyncLLM,
    first: Side,
    second: Side,
    places: Sequence[tuple[int, int]],
    options: InputOptions | None,
    params: PoolingParams,
    *,
    typed: bool,
) -> PreparedScores:
    """``typed``: tokens of the second text have another type.

    A long pair is truncated in its second text.
    """
    options, limit = options or InputOptions(), (await llm.card()).max_model_len
    keep = tokens_kept(options, limit, limit)
    from_left = options.truncation_side is TruncationSide.LEFT
    options = replace(options, truncate_prompt_tokens=None, truncation_side=None)
    made = []
    for one, two in places:
        names = first.name(one), second.name(two)
        ids, at = await llm.encode_pair(
            first.texts[one], second.texts[two], params=names, keep=keep, from_left=from_left
        )
        prompt = TokensPrompt(tuple(ids))
        asked = msgspec.structs.replace(params, second_text_at=at) if typed else params
        made.append(await llm.prepare_pooling(prompt, asked, options=options, param=names[1]))
        await asyncio.sleep(0)  # let others run
    return PreparedScores(tuple(made), tuple((index,) for index in range(len(made))))


async def _by_vectors(
    llm: AsyncLLM,
    first: Side,
    second: Side,
    places: Sequence[tuple[int, int]],
    options: InputOptions | None,
) -> PreparedScores:
    made: list[PreparedRequest] = []
    known: dict[str, int] = {}
    for side in (first, second):
        for index, text in enumerate(side.texts):
            if text not in known:
                known[text] = len(made)
                name = side.name(index)
                prompt = TextPrompt(text)
                made.append(await llm.prepare_pooling(prompt, _VECTOR, options=options, param=name))
                await asyncio.sleep(0)  # let others run
    pairs = tuple((known[first.texts[one]], known[second.texts[two]]) for one, two in places)
    return PreparedScores(tuple(made), pairs)


async def pool_all(
    llm: AsyncLLM,
    prepared: Sequence[PreparedRequest],
    context: RequestContext = ORDINARY,
    *,
    at_once: int,
    most_values: int | None = None,
) -> list[PooledRequestOutput]:
    """Return the outputs in order, with ``at_once`` requests at a time.

    The first failure cancels all. Raises InvalidParameter for more than ``most_values`` values.
    """
    seats = asyncio.Semaphore(at_once)
    held = 0

    async def one(request: PreparedRequest) -> PooledRequestOutput:
        nonlocal held
        async with seats:
            output = await llm.pool(request, context)
        held += len(output.values) // 4
        if most_values is not None and held > most_values:
            raise InvalidParameter(
                "input", f"{held} values", f"at most {most_values} in one answer"
            )
        return output

    return await all_of([one(each) for each in prepared])


async def all_of(work: Sequence[Coroutine[Any, Any, _Answer]]) -> list[_Answer]:
    """Return the results in order, computed concurrently. The first failure cancels all."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)
