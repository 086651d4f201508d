"""``tandem.v1.Inference``: the implementation of each method, on the service that HTTP uses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from tandem.llm.prepared import PreparedRequest
from tandem.llm.scoring import Side, prepare_scores
from tandem.protocol.context import RequestContext
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import OutputKind
from tandem.protocol.version import tandem_version
from tandem.router.openai.bodies.pooling_schemas import PooledBody
from tandem.router.openai.bodies.schemas import ChatBody, CompletionBody
from tandem.router.openai.chat_options import chat_options
from tandem.router.openai.completions import prompts_of
from tandem.router.openai.generate import begin, count_finished
from tandem.router.openai.pooled import PooledCall
from tandem.router.openai.service import Service, blaming, checked_id, options_of
from tandem.router.rpc import tandem_pb2 as pb
from tandem.router.rpc.call import Call, Calls
from tandem.router.rpc.reading import embedding_body, generation_body, score_body, tokenize_body
from tandem.router.rpc.writing import pooled_usage, step_message
from tandem.text.input_processor import InputOptions


class Inference:
    """The methods. Errors are raised as they are: the server makes statuses of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._calls = Calls()

    async def generate(
        self, request: pb.GenerateRequest, context: Call
    ) -> AsyncGenerator[bytes, None]:
        """Yield a message a step, or one at the end, each as its bytes."""
        service, request_id = self._service, _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await generation_body(service, request, context)
            service.model_name(body.model)
            kind = OutputKind.DELTA if request.stream else OutputKind.FINAL_ONLY
            options = replace(options_of(body, service), budget_ms=_budget(context))
            embeds = body.take_embeds() if isinstance(body, CompletionBody) else []
            with blaming(body.client_names()), service.embeds.holding(embeds):
                prepared = await self._prepared(body, kind, options, embeds)
                came = RequestContext(arrived=context.arrived)
                counters = service.counters(came)
                async with aclosing(service.llm.stream(prepared, came)) as outputs:
                    async for output in outputs:
                        count_finished(counters, output)
                        yield step_message(request_id, output)

    async def _prepared(
        self,
        body: ChatBody | CompletionBody,
        kind: OutputKind,
        options: InputOptions,
        embeds: list[str],
    ) -> PreparedRequest:
        service, params = self._service, {**body.sampling(), "output_kind": kind}
        if isinstance(body, CompletionBody):
            (prompt,) = await prompts_of(service, body, embeds)
            return await service.llm.prepare(prompt, params, options=options)
        parsers = service.parsers
        options = replace(
            options,
            seen_special_ids=parsers.seen,
            reasoning=parsers.span,
            thinks=parsers.thinks,
        )
        chat = chat_options(body, service)
        return await service.llm.prepare_chat(body.messages, params, options=options, chat=chat)

    async def embed(self, request: pb.EmbedRequest, context: Call) -> pb.EmbedResponse:
        """Return a vector for each input."""
        request_id = _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await embedding_body(self._service, request, context)
            call = self._pooled(request_id, body, context)
            params = PoolingParams(dimensions=body.dimensions, normalize=body.normalize)
            outputs = await call.pool(await call.prepare(body.input, params))
            response = pb.EmbedResponse(usage=pooled_usage(outputs))
            for each in outputs:
                response.data.add().values.extend(each.floats)
                await asyncio.sleep(0)  # others' turn
            return response

    async def score(self, request: pb.ScoreRequest, context: Call) -> pb.ScoreResponse:
        """Return a score for each pair."""
        request_id = _id_of(request.request_id)
        with self._calls.running(request_id, context):
            body = await score_body(self._service, request, context)
            call = self._pooled(request_id, body, context)
            sides = [Side(body.text_1, "text_1"), Side(body.text_2, "text_2")]
            for side in sides:
                call.bound(side.param, side.texts)
            prepared = await prepare_scores(call.service.llm, *sides, options=call.options)
            scored, outputs = await prepared.scores(call.pool)
            scores = [each.outputs.score for each in scored]
            return pb.ScoreResponse(scores=scores, usage=pooled_usage(outputs))

    def _pooled(self, request_id: str, body: PooledBody, context: Call) -> PooledCall:
        service = self._service
        answer = begin("rpc", request_id, service.model_name(body.model))
        options = replace(options_of(body, service), budget_ms=_budget(context))
        return PooledCall(service, answer, RequestContext(arrived=context.arrived), options)

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        """Return the ids of a text or of a chat."""
        service = self._service
        body = await tokenize_body(service, request, call)
        service.model_name(body.model)
        if body.prompt is None:
            ids = await service.llm.encode_chat(
                body.messages or [],
                chat_options(body, service),
                add_special_tokens=bool(body.add_special_tokens),
            )
        else:
            special = body.add_special_tokens is not False
            ids = await service.llm.encode(body.prompt, add_special_tokens=special)
        return pb.TokenizeResponse(tokens=ids)

    async def abort(self, request: pb.AbortRequest, context: Call) -> pb.AbortResponse:
        """End calls of an id."""
        request_id = checked_id("request_id", request.request_id)
        return pb.AbortResponse(aborted=self._calls.abort(request_id, context))

    async def get_model_info(self, _: pb.GetModelInfoRequest, __: Call) -> pb.ModelInfo:
        """Return the names and limits."""
        card = await self._service.llm.card()
        return pb.ModelInfo(
            names=self._service.names(),
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            pools=card.pooling is not None,
            version=tandem_version(),
        )


def _id_of(given: str) -> str:
    return checked_id("request_id", given) if given else uuid.uuid4().hex


def _budget(context: Call) -> int | None:
    """Return the client's deadline, in milliseconds from the arrival of the call."""
    if context.deadline is None:
        return None
    return max(1, int(1000 * (context.deadline - context.arrived)))
