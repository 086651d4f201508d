"""``/classify``, ``/score`` and ``/rerank``: classes of texts, and similarity of two texts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.scoring import Side, prepare_scores
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.pooling import PoolingParams, PoolingTask
from tandem.router.endpoints import Routes
from tandem.router.openai.answers.sse import while_connected
from tandem.router.openai.bodies.numbers import MAX_INTEGER
from tandem.router.openai.bodies.pooling_schemas import (
    ClassifyBody,
    PooledBody,
    RerankBody,
    ScoreBody,
)
from tandem.router.openai.pooled import PooledCall
from tandem.router.openai.service import read

routes = Routes("pooling")


@routes.post("/classify")
async def classify(request: Request) -> Response:
    """A probability for each label of the model, and the best of them, for each input."""
    body = await read(ClassifyBody, request)
    call = PooledCall.of("classify", request, body)
    params = PoolingParams(task=PoolingTask.CLASSIFY, activation=body.activation)
    async with while_connected(request.receive):
        pooling = (await call.service.llm.card()).pooling
        labels = () if pooling is None else pooling.labels
        if not labels:
            allowed = "a model with a classification head: this one has none"
            raise InvalidParameter("model", call.answer.model, allowed)
        outputs = await call.pool(await call.prepare(body.input, params))
        data = []
        for index, output in enumerate(outputs):
            probs = output.floats.tolist()
            label = labels[max(range(len(probs)), key=probs.__getitem__)]
            data.append({"index": index, "label": label, "probs": probs, "num_classes": len(probs)})
        return call.reply(outputs, {"object": "list", "data": data})


@routes.post("/score")
@routes.post("/v1/score")
async def score(request: Request) -> Response:
    """Score texts: one with each of ``text_2``, or pair by pair."""
    body = await read(ScoreBody, request)
    call = PooledCall.of("score", request, body)
    first, second = _side(call, "text_1", body.text_1), _side(call, "text_2", body.text_2)
    async with while_connected(request.receive):
        scores, outputs = await _scores(call, body, first, second, body.activation)
        data = [
            {"object": "score", "index": index, "score": each} for index, each in enumerate(scores)
        ]
        return call.reply(outputs, {"object": "list", "data": data})


@routes.post("/rerank")
@routes.post("/v1/rerank")
@routes.post("/v2/rerank")
async def rerank(request: Request) -> Response:
    """Documents by how well they go with the query, the best first."""
    body = await read(RerankBody, request)
    call = PooledCall.of("rerank", request, body)
    texts = _texts_of(body.documents)
    call.bound("documents", texts)
    top = len(texts) if body.top_n is None else body.top_n
    if not 1 <= top <= MAX_INTEGER:
        raise InvalidParameter("top_n", top, f"an integer from 1 to {MAX_INTEGER}")
    query = Side([body.query], "query", is_list=False)
    async with while_connected(request.receive):
        documents = Side(texts, "documents")
        scores, outputs = await _scores(call, body, query, documents, body.activation)
        best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:top]
        results = []
        for index in best:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return call.reply(outputs, {"results": results})


async def _scores(
    call: PooledCall, body: PooledBody, first: Side, second: Side, activation: bool | None
) -> tuple[list[float], list[Any]]:
    """Return a score for each pair, and the outputs from which they are computed."""
    prepared = await prepare_scores(
        call.service.llm, first, second, options=call.options, activation=activation
    )
    scores, outputs = await prepared.scores(call.pool)
    return [each.outputs.score for each in scores], outputs


def _side(call: PooledCall, param: str, value: object) -> Side:
    if isinstance(value, str):
        return Side([value], param, is_list=False)
    if not isinstance(value, list) or not value:
        raise InvalidParameter(param, value, "a text or a list of texts, not empty")
    call.bound(param, value)
    for index, each in enumerate(value):
        if not isinstance(each, str):
            raise InvalidParameter(f"{param}[{index}]", each, "a text")
    return Side(value, param)


def _texts_of(documents: object) -> list[str]:
    """Return the texts, bare or under ``text``."""
    if not isinstance(documents, list) or not documents:
        raise InvalidParameter("documents", documents, "a list of texts, not empty")
    found = []
    for index, each in enumerate(documents):
        text = each.get("text") if isinstance(each, dict) and set(each) == {"text"} else each
        if not isinstance(text, str):
            allowed = 'a text, or {"text": a text}'
            raise InvalidParameter(f"documents[{index}]", each, allowed)
        found.append(text)
    return found
