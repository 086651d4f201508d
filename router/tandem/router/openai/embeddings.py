"""``POST /v1/embeddings`` and ``POST /pooling``: vectors of texts, and outputs of a head."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from tandem.protocol.pooling import PoolingParams, PoolingTask
from tandem.router.endpoints import Routes
from tandem.router.openai.answers.sse import while_connected
from tandem.router.openai.bodies.pooling_schemas import EmbeddingBody, PoolingBody
from tandem.router.openai.pooled import PooledCall, item_of
from tandem.router.openai.service import read

routes = Routes("pooling")


@routes.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """A vector for each input."""
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
            await asyncio.sleep(0)  # others' turn
        return await call.reply_data(outputs, items)


@routes.post("/pooling")
async def pool(request: Request) -> Response:
    """Return the result of a task for each input: a vector, one a token, or a number a label."""
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
            await asyncio.sleep(0)  # others' turn
        return await call.reply_data(outputs, items)
