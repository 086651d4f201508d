"""Scores by late interaction, offline and over a client that forgets."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Sequence

import pytest
from tests.engine_run.encoder_models import maxsim_of
from tests.llm.encoder_folders import TEXTS, colbert_folder

from tandem.llm import LLM
from tandem.llm.outputs import PooledRequestOutput
from tandem.llm.sampling import PreparedRequest
from tandem.llm.scoring import MOST_ROUNDS, QUERIES_AT_ONCE, LateScores, asked
from tandem.protocol.errors import InvalidParameter, RequestFailed
from tandem.protocol.ids import RequestKey
from tandem.protocol.pooling import NO_SAMPLING, LateInteractionMode, LateInteractionParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.text.input_processor import ProcessedInput

KEEP, SCORE = LateInteractionMode.CACHE_QUERY, LateInteractionMode.SCORE_DOC


def test_scores_are_those_of_a_plain_maxsim() -> None:
    """One text with each, pair by pair, equal texts among them; vectors of tokens are told."""
    folder, vectors_of = colbert_folder()
    with LLM(str(folder), device="cpu", max_num_seqs=3) as llm:
        one = llm.score(TEXTS[0], TEXTS)
        pairs = llm.score(TEXTS, [TEXTS[1]] * len(TEXTS))
        (tokens,) = llm.encode(TEXTS[:1])
        with pytest.raises(InvalidParameter, match="a vector for each token"):
            llm.embed(TEXTS)
        with pytest.raises(InvalidParameter, match="activation"):
            llm.score(TEXTS[0], TEXTS, activation=False)
    for text, got in zip(TEXTS, one, strict=True):
        want = maxsim_of(vectors_of(TEXTS[0]), vectors_of(text))
        assert got.outputs.score == pytest.approx(want, rel=1e-3)
        assert len(got.prompt_token_ids) == len(vectors_of(TEXTS[0])) + len(vectors_of(text))
    for text, got in zip(TEXTS, pairs, strict=True):
        want = maxsim_of(vectors_of(text), vectors_of(TEXTS[1]))
        assert got.outputs.score == pytest.approx(want, rel=1e-3)
    assert len(tokens.outputs.data) == len(vectors_of(TEXTS[0]))


class Keeper:
    """A worker's store without a worker: ``room`` queries, and some documents find none."""

    def __init__(self, room: int, lost: int = 0) -> None:
        self.room, self.lost = room, lost
        self.kept: dict[str, int] = {}
        self.most = 0
        self.asked: list[LateInteractionParams] = []

    async def pool(self, requests: Sequence[PreparedRequest]) -> list[PooledRequestOutput]:
        return [self._answer(each.processed.request) for each in requests]

    def _answer(self, request: EngineCoreRequest) -> PooledRequestOutput:
        assert request.pooling is not None
        late = request.pooling.late_interaction
        assert late is not None
        self.asked.append(late)
        value = 1.0
        if late.mode is KEEP:
            self.kept[late.query_key] = late.query_uses
            while len(self.kept) > self.room:
                del self.kept[next(iter(self.kept))]
            self.most = max(self.most, len(self.kept))
        elif self.lost or late.query_key not in self.kept:
            self.lost = max(0, self.lost - 1)
            value = math.nan
        else:
            self.kept[late.query_key] -= 1
            if not self.kept[late.query_key]:
                del self.kept[late.query_key]
            value = float(len(request.prompt_token_ids))
        return PooledRequestOutput(
            prompt_token_ids=request.prompt_token_ids,
            values=array("f", [value]).tobytes(),
            num_cached_tokens=0,
        )


def scores_of(queries: int, documents: Sequence[int]) -> LateScores:
    """Of documents by their queries; the n-th has n + 1 tokens."""

    def prepared(mode: LateInteractionMode, key: str, count: int) -> PreparedRequest:
        request = EngineCoreRequest(
            key=RequestKey(b"r", key, 0),
            prompt_token_ids=[5] * count,
            params=NO_SAMPLING,
            pooling=asked(mode, key),
        )
        return PreparedRequest(
            request_id=key, processed=ProcessedInput(request=request, prompt=None)
        )

    made = [prepared(SCORE, f"q{query}", index + 1) for index, query in enumerate(documents)]
    kept = [prepared(KEEP, f"q{query}", 2) for query in range(queries)]
    return LateScores(tuple(kept), tuple(made), tuple(documents))


def test_queries_are_kept_for_as_many_documents_as_there_are() -> None:
    keeper = Keeper(room=9)
    scores, outputs = asyncio.run(scores_of(2, [0, 1, 1, 0, 1]).scores(keeper.pool))
    assert [each.outputs.score for each in scores] == [1, 2, 3, 4, 5]
    assert [each.query_uses for each in keeper.asked if each.mode is KEEP] == [2, 3]
    assert [len(each.prompt_token_ids) for each in outputs] == [2, 2, 1, 2, 3, 4, 5]
    assert keeper.kept == {}


def test_a_query_that_is_gone_is_asked_anew() -> None:
    """For the documents that did not find it, and for no others."""
    keeper = Keeper(room=9, lost=2)
    scores, _ = asyncio.run(scores_of(1, [0] * 5).scores(keeper.pool))
    assert [each.outputs.score for each in scores] == [1, 2, 3, 4, 5]
    assert [each.query_uses for each in keeper.asked if each.mode is KEEP] == [5, 2]


def test_many_queries_take_turns() -> None:
    """A call with more of them than a worker has room for is answered all the same."""
    keeper = Keeper(room=QUERIES_AT_ONCE)
    count = 3 * QUERIES_AT_ONCE + 1
    scores, outputs = asyncio.run(scores_of(count, range(count)).scores(keeper.pool))
    assert [each.outputs.score for each in scores] == [n + 1 for n in range(count)]
    assert len(outputs) == 2 * count
    assert keeper.most <= QUERIES_AT_ONCE
    assert len(keeper.asked) == 2 * count


def test_a_worker_that_keeps_nothing_ends_the_call() -> None:
    keeper = Keeper(room=0)
    with pytest.raises(RequestFailed, match="no worker kept the query"):
        asyncio.run(scores_of(1, [0]).scores(keeper.pool))
    assert sum(each.mode is SCORE for each in keeper.asked) == MOST_ROUNDS
