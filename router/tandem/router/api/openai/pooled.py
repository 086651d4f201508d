"""Common part of embeddings, pooling, classes and scores.

The inputs of a call are prepared in order and run concurrently, each as a request.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.llm.cpu_pool import weight
from tandem.llm.outputs import PooledRequestOutput, floats_of
from tandem.llm.sampling import PreparedRequest, parts_of
from tandem.llm.scoring import Side, pool_all, prepare_scores
from tandem.protocol.context import RequestContext
from tandem.protocol.errors import InvalidParameter, Refusal, RequestRefused
from tandem.protocol.outputs import FinishReason
from tandem.protocol.pooling import MAX_TOKEN_VALUES, PoolingParams, PoolingTask
from tandem.router.api.openai.answers.chunks import usage
from tandem.router.api.openai.answers.sse import while_connected
from tandem.router.api.openai.bodies.bounds import MAX_INPUTS, MAX_INTEGER, too_many
from tandem.router.api.openai.bodies.pooling_schemas import (
    ClassifyBody,
    EmbeddingBody,
    PooledBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from tandem.router.api.openai.service import (
    Answer,
    Service,
    begin_for,
    context_of,
    input_options,
    read,
    service_of,
)
from tandem.router.endpoints import Routes
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import Prompt, parse_prompts

_OURS = "prompt_token_ids"
AT_ONCE = 8_192
"""Tokens of inputs that are prepared together."""
AT_A_TIME = 8_192
"""Numbers that are written without a pause for other requests."""
CODED_AT_A_TIME = 3 << 16
"""Bytes that are encoded to base64 without a pause; a multiple of three."""


@dataclass(frozen=True, slots=True)
class PooledCall:
    """Call of one client."""

    service: Service
    answer: Answer
    context: RequestContext
    options: InputOptions

    @classmethod
    def of(cls, prefix: str, request: Request, body: PooledBody) -> PooledCall:
        """Begin the call of ``request``. Raises HttpProblem or InvalidParameter."""
        service = service_of(request)
        answer = begin_for(request, body, prefix, service.model_name(body.model))
        return cls(service, answer, context_of(request), input_options(body, request))

    async def prepare(
        self, value: object, params: PoolingParams, *, param: str = "input"
    ) -> list[PreparedRequest]:
        """Prepare a text, token ids, or a list of either. Raises InvalidParameter."""
        prompts = await self._prompts(value, param)
        names = [f"{param}[{index}]" for index in range(len(prompts))]
        names = names if len(prompts) > 1 else [param]
        prepared: list[PreparedRequest] = []
        for part in parts_of(prompts, AT_ONCE, len(prompts)):
            prepared += await self.service.llm.prepare_all_pooling(
                part, params, options=self.options, names=names[len(prepared) :][: len(part)]
            )
            await asyncio.sleep(0)  # let others run
        return prepared

    async def _prompts(self, value: object, param: str) -> list[Prompt]:
        several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        if isinstance(value, list) and several:
            self.bound(param, value)
        for each in value if isinstance(value, list) and several else [value]:
            if not isinstance(each, str | list):
                allowed = "a text, token ids, or a list of texts or of lists of token ids"
                raise InvalidParameter(param, each, allowed)
        cpu_pool = self.service.llm.cpu_pool
        return await cpu_pool.run(weight(value), parse_prompts, value, param=param)

    def bound(self, param: str, values: Sequence[object]) -> None:
        """Raise InvalidParameter for too many inputs."""
        most = max(MAX_INPUTS, self.service.bounds.prompts)
        if len(values) > most:
            raise too_many(param, values, most)

    async def pool(self, prepared: Sequence[PreparedRequest]) -> list[PooledRequestOutput]:
        """Return the outputs in order; the first failure ends all."""
        try:
            outputs = await pool_all(
                self.service.llm,
                prepared,
                self.context,
                at_once=self.service.max_parallel_prompts,
                most_values=MAX_TOKEN_VALUES,
            )
        except RequestRefused as error:
            if error.refusal.param != _OURS:
                raise
            raise RequestRefused(_of_input(error.refusal)) from error
        metrics = self.service.counters(self.context)
        for _ in outputs:
            metrics.choice_finished(FinishReason.STOP)
        return outputs

    def reply(self, outputs: Sequence[PooledRequestOutput], fields: dict[str, Any]) -> Response:
        """Return the answer with ``fields`` and common fields."""
        content = msgspec.json.encode({**self._around(outputs), **fields})
        return Response(content, media_type="application/json")

    async def reply_data(
        self, outputs: Sequence[PooledRequestOutput], items: Iterable[Sequence[bytes]]
    ) -> Response:
        """Return the answer with a list of ``items``, JSON in parts, with pauses for other
        requests.
        """
        parts = [msgspec.json.encode({**self._around(outputs), "object": "list"})[:-1]]
        parts.append(b',"data":')
        for index, item in enumerate(items):
            parts += (b"," if index else b"[", *item)
        parts.append(b"]}")
        size = sum(map(len, parts))
        content = await self.service.llm.cpu_pool.run(size // AT_A_TIME, b"".join, parts)
        return Response(content, media_type="application/json")

    def _around(self, outputs: Sequence[PooledRequestOutput]) -> dict[str, Any]:
        return {
            "id": self.answer.id,
            "created": self.answer.created,
            "model": self.answer.model,
            "usage": usage(
                sum(len(each.prompt_token_ids) for each in outputs),
                0,
                sum(each.num_cached_tokens for each in outputs),
            ),
        }


def _of_input(refusal: Refusal) -> Refusal:
    """Name the client's input in a worker's refusal."""
    message = refusal.message.replace(_OURS, "input")
    return msgspec.structs.replace(refusal, param="input", message=message)


async def item_of(
    output: PooledRequestOutput,
    fields: dict[str, Any],
    name: str,
    *,
    as_base64: bool,
    by_token: bool = False,
) -> list[bytes]:
    """Return JSON of an object with ``fields`` and the values under ``name``.

    The values are base64 of their bytes, a list, or a list for each token.
    """
    parts = [msgspec.json.encode(fields)[:-1] + f',"{name}":'.encode()]
    if as_base64:
        parts += [b'"', *await _coded(output.values), b'"']
    elif by_token:
        size = len(output.values) // len(output.prompt_token_ids)
        parts += [b"[", *await _listed(output.values, size), b"]"]
    else:
        parts += await _listed(output.values, len(output.values))
    parts.append(b"}")
    return parts


async def _coded(values: bytes) -> list[bytes]:
    parts = []
    for at in range(0, len(values), CODED_AT_A_TIME):
        parts.append(base64.b64encode(values[at : at + CODED_AT_A_TIME]))
        await asyncio.sleep(0)
    return parts


async def _listed(values: bytes, size: int) -> list[bytes]:
    parts, written = [], 0
    for at in range(0, len(values), size):
        parts.append(b",[" if at else b"[")
        end = at + size
        for start in range(at, end, 4 * AT_A_TIME):
            piece = floats_of(values[start : min(start + 4 * AT_A_TIME, end)])
            parts += (b"," if start > at else b"", msgspec.json.encode(piece.tolist())[1:-1])
            written += len(piece)
            if written >= AT_A_TIME:
                written = 0
                await asyncio.sleep(0)
        parts.append(b"]")
    return parts


routes = Routes("pooling")


@routes.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """Return a vector for each input."""
    body = await read(EmbeddingBody, request)
    call = PooledCall.of("embd", request, body)
    params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
    async with while_connected(request.receive):
        outputs = await call.pool(await call.prepare(body.input, params))
        as_base64 = body.encoding_format == "base64"
        items = []
        for index, output in enumerate(outputs):
            fields = {"object": "embedding", "index": index}
            items.append(await item_of(output, fields, "embedding", as_base64=as_base64))
            await asyncio.sleep(0)  # let others run
        return await call.reply_data(outputs, items)


@routes.post("/pooling")
async def pool(request: Request) -> Response:
    """Return the result of a task for each input: a vector, one per token, or a number per
    label.
    """
    body = await read(PoolingBody, request)
    call = PooledCall.of("pool", request, body)
    task = PoolingTask(body.task or PoolingTask.EMBED)
    params = PoolingParams(
        task=task,
        dimensions=body.dimensions,
        normalize=body.normalize,
        activation=body.activation,
    )
    async with while_connected(request.receive):
        outputs = await call.pool(await call.prepare(body.input, params))
        as_base64 = body.encoding_format == "base64"
        by_token = task is PoolingTask.TOKEN_EMBED
        items = []
        for index, output in enumerate(outputs):
            fields = {"object": "pooling", "index": index}
            items.append(
                await item_of(output, fields, "data", as_base64=as_base64, by_token=by_token)
            )
            await asyncio.sleep(0)  # let others run
        return await call.reply_data(outputs, items)


@routes.post("/classify")
async def classify(request: Request) -> Response:
    """Return the probabilities of the model's labels, and the best label, for each input."""
    body = await read(ClassifyBody, request)
    call = PooledCall.of("classify", request, body)
    params = PoolingParams(task=PoolingTask.CLASSIFY, activation=body.activation)
    async with while_connected(request.receive):
        pooling = (await call.service.llm.card()).pooling
        labels = () if pooling is None else pooling.labels
        if not labels:
            allowed = "a model with a classification head, which this model lacks"
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
    """Return documents sorted by their score for the query."""
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
