"""Run a chat's body to the model's outputs, for chats and for all APIs that become a chat."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request

from tandem.llm.prepared import PreparedRequest
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import OutputKind
from tandem.router.api.openai.answers.answer_reader import AnswerReader
from tandem.router.api.openai.bodies.hints import note_ignored
from tandem.router.api.openai.bodies.schemas import ChatBody, TokenizeBody
from tandem.router.api.openai.bodies.tools import is_forced
from tandem.router.api.openai.generate import Outputs, count_finished, run
from tandem.router.api.openai.service import (
    Service,
    blaming,
    context_of,
    input_options,
)
from tandem.text.chat_template import ChatOptions

_EFFORT = frozenset({"reasoning_effort", "enable_thinking"})
"""Names under which templates read ``reasoning_effort``."""


def chat_options(body: ChatBody | TokenizeBody, service: Service) -> ChatOptions:
    """Return the options of a chat. Raises InvalidParameter."""
    if body.chat_template is not None and not service.trust_request_chat_template:
        raise InvalidParameter(
            "chat_template", body.chat_template, "leave it out: this server allows only the model's"
        )
    tools = body.tools or None
    forced = isinstance(body, ChatBody) and is_forced(body.tool_choice)
    if forced and not _reads_tools(body, service):
        tools = None  # a grammar holds the model to them, told of or not
    opens_turn = body.add_generation_prompt
    options = ChatOptions(
        add_generation_prompt=not body.continue_final_message if opens_turn is None else opens_turn,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        template_kwargs={**_effort(body), **(body.chat_template_kwargs or {})},
        tools=tools,
        documents=body.documents if isinstance(body, ChatBody) else None,
    )
    _check_read(body, options, service)
    return options


def _reads_tools(body: ChatBody | TokenizeBody, service: Service) -> bool:
    if body.chat_template is not None:
        return True
    options = ChatOptions(tools=body.tools)
    return "tools" in service.llm.tokenizer.chat_templates.names_of(options)


def _effort(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def _check_read(body: ChatBody | TokenizeBody, options: ChatOptions, service: Service) -> None:
    """Refuse arguments that the model's template does not read; a client's template is not
    checked."""
    wanted: dict[str, tuple[object, frozenset[str]]] = {}
    if options.tools:
        wanted["tools"] = (body.tools, frozenset({"tools"}))
    if options.documents:
        wanted["documents"] = (options.documents, frozenset({"documents"}))
    says_effort = isinstance(body, ChatBody) and body.reasoning_effort not in (None, "none")
    if not (wanted or says_effort) or options.chat_template is not None:
        return
    names = service.llm.tokenizer.chat_templates.names_of(options)
    if isinstance(body, ChatBody) and says_effort and not names & _EFFORT:
        body.ignore(body.effort_name)
    for param, (value, readers) in wanted.items():
        if not names & readers:
            raise InvalidParameter(
                param, value, f"leave it out: this model's chat template does not read {param}"
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
        sampling = await service.llm.cpu_pool.run(size, body.sampling)
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
