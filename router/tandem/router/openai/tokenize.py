"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from tandem.protocol.errors import InvalidParameter
from tandem.router.openai.schemas import DetokenizeBody, TokenizeBody, parse
from tandem.router.openai.service import Service, documented, read_body, service_of
from tandem.text.chat_template import ChatOptions

routes = APIRouter(tags=["tokenizer"])


@routes.post("/tokenize", openapi_extra=documented(TokenizeBody))
async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a chat."""
    body = parse(TokenizeBody, await read_body(request))
    body.check_extras()
    service = service_of(request)
    service.model_name(body.model)
    tokens = await _tokens(service, body)
    max_model_len = (await service.llm.card()).max_model_len if service.is_served() else None
    content = {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": [service.llm.tokenizer.token_text(token) for token in tokens]
        if body.return_token_strs
        else None,
    }
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidParameter("prompt", body.prompt, "either prompt or messages")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await service.llm.encode(body.prompt, add_special_tokens=special)
    opens_turn = body.add_generation_prompt
    chat = ChatOptions(
        add_generation_prompt=not body.continue_final_message if opens_turn is None else opens_turn,
        continue_final_message=bool(body.continue_final_message),
        template_kwargs=body.chat_template_kwargs or {},
    )
    return await service.llm.encode_chat(body.messages or [], chat)


@routes.post("/detokenize", openapi_extra=documented(DetokenizeBody))
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens spelled out."""
    body = parse(DetokenizeBody, await read_body(request))
    body.check_extras()
    service = service_of(request)
    service.model_name(body.model)
    text = await service.llm.decode(body.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
