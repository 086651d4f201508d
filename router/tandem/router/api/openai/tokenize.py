"""``POST /tokenize`` and ``POST /detokenize``, in vLLM's shapes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tandem.router.api.openai.bodies.schemas import DetokenizeBody, TokenizeBody
from tandem.router.api.openai.chat import chat_options
from tandem.router.api.openai.service import Service, read, service_of
from tandem.router.endpoints import Routes

routes = Routes("tokenizer")


@routes.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or a chat."""
    body = await read(TokenizeBody, request)
    service = service_of(request)
    service.model_name(body.model)
    tokens = await _tokens(service, body)
    max_model_len = (await service.llm.card()).max_model_len if service.is_served() else None
    content = {
        "count": len(tokens),
        "max_model_len": max_model_len,
        "tokens": tokens,
        "token_strs": await service.llm.token_texts(tokens) if body.return_token_strs else None,
    }
    encoded = await service.llm.cpu_pool.run(len(tokens), msgspec.json.encode, content)
    return Response(encoded, media_type="application/json")


async def _tokens(service: Service, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await service.llm.encode(body.prompt, add_special_tokens=special)
    return await service.llm.encode_chat(
        body.messages or [],
        chat_options(body, service),
        add_special_tokens=bool(body.add_special_tokens),
    )


@routes.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    body = await read(DetokenizeBody, request)
    service = service_of(request)
    service.model_name(body.model)
    text = await service.llm.decode(body.tokens, skip_special_tokens=False, param="tokens")
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")
