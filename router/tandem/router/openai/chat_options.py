"""Options of a body for its chat's prompt, for ``/v1/chat/completions`` and ``/tokenize``.

Input that the model's chat template does not read is refused: the answer would be that to another
question. An effort that it does not read is a hint.
"""

from __future__ import annotations

from typing import Any

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.bodies.forced_calls import is_forced
from tandem.router.openai.bodies.schemas import ChatBody, TokenizeBody
from tandem.router.openai.service import Service
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
