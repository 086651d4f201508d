"""Run a chat's body to the model's outputs, for chats and for all APIs that become a chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from tandem.llm.prepared import PreparedRequest
from tandem.protocol.sampling import OutputKind
from tandem.router.openai.answers.answer_reader import AnswerReader
from tandem.router.openai.bodies.reading import note_ignored
from tandem.router.openai.bodies.schemas import ChatBody
from tandem.router.openai.chat_options import chat_options
from tandem.router.openai.generate import Outputs, count_finished, run
from tandem.router.openai.service import (
    Service,
    blaming,
    context_of,
    input_options,
)


async def prepare_chat(
    service: Service,
    body: ChatBody,
    request: Request,
    reader: AnswerReader | None,
    messages: Sequence[dict[str, Any]] | None = None,
) -> PreparedRequest:
    """Prepare the body's chat, or ``messages`` instead of its own, as a request that is not sent
    yet.

    Raises InvalidParameter with the names of a chat's parameters.
    """
    kind = OutputKind.DELTA if body.stream or reader is not None else OutputKind.FINAL_ONLY
    options = input_options(body, request)
    if reader is not None:
        parsers = service.parsers
        options = replace(
            options,
            seen_special_ids=parsers.seen,
            reasoning=partial(parsers.span, continued=body.continued),
            thinks=parsers.thinks,
        )
    with blaming(body.client_names()):
        # Beside the loop where the body is large: schemas of tools become one that is.
        size: int = request.scope["state"]["body_bytes"]
        chat = chat_options(body, service)
        note_ignored(request.scope, body.ignored)
        sampling = await service.llm.beside.run(size, body.sampling)
        return await service.llm.prepare_chat(
            body.messages if messages is None else messages,
            {**sampling, **({} if reader is None else reader.form), "output_kind": kind},
            options=options,
            chat=chat,
        )


async def outputs_of(
    service: Service, body: ChatBody, request: Request, prepared: PreparedRequest
) -> Outputs:
    """Yield the model's outputs. Closing it aborts the request."""
    with blaming(body.client_names()):
        async with aclosing(run(service, [prepared], context_of(request))) as outputs:
            async for output in outputs:
                yield output


async def chat_outputs(
    service: Service, body: ChatBody, request: Request, reader: AnswerReader | None
) -> Outputs:
    """Do both of the above, without the generators between: each token would go through them."""
    prepared, context = await prepare_chat(service, body, request, reader), context_of(request)
    metrics = service.counters(context)
    with blaming(body.client_names()):
        async with aclosing(service.llm.stream(prepared, context)) as outputs:
            async for output in outputs:
                count_finished(metrics, output)
                yield 0, output
