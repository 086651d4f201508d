"""The common part of embeddings, pooling, classes and scores: from a body to its answers.

The inputs of a call are prepared one after the other and run concurrently. Each is a request of its
own to the fleet, so that workers batch those of all calls.
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

from tandem.llm.beside import weight
from tandem.llm.outputs import PooledRequestOutput, floats_of
from tandem.llm.prepared import PreparedRequest
from tandem.llm.scoring import pool_all
from tandem.llm.weighing import parts_of
from tandem.protocol.context import RequestContext
from tandem.protocol.errors import InvalidParameter, Refusal, RequestRefused
from tandem.protocol.finish import FinishReason
from tandem.protocol.pooling import MAX_TOKEN_VALUES, PoolingParams
from tandem.router.openai.answers.chunks import usage
from tandem.router.openai.bodies.bounds import MAX_INPUTS, too_many
from tandem.router.openai.bodies.pooling_schemas import PooledBody
from tandem.router.openai.generate import Answer, begin_for
from tandem.router.openai.service import (
    Service,
    context_of,
    input_options,
    service_of,
)
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import Prompt, parse_prompts

_OURS = "prompt_token_ids"
AT_ONCE = 8_192
"""Tokens of inputs that are prepared together."""
AT_A_TIME = 8_192
"""Numbers that are written before other requests have their turn, in about half a millisecond."""
CODED_AT_A_TIME = 3 << 16
"""Bytes as base64, the same; a multiple of three, so that parts stand side by side."""


@dataclass(frozen=True, slots=True)
class PooledCall:
    """One call."""

    service: Service
    answer: Answer
    context: RequestContext
    options: InputOptions

    @classmethod
    def of(cls, prefix: str, request: Request, body: PooledBody) -> PooledCall:
        """Begin the call of ``request``. Raises HttpProblem (no such model), InvalidParameter."""
        service = service_of(request)
        answer = begin_for(request, body, prefix, service.model_name(body.model))
        return cls(service, answer, context_of(request), input_options(body, request))

    async def prepare(
        self, value: object, params: PoolingParams, *, param: str = "input"
    ) -> list[PreparedRequest]:
        """Prepare a text, token ids, or a list of either. Raises InvalidParameter naming which."""
        prompts = await self._prompts(value, param)
        names = [f"{param}[{index}]" for index in range(len(prompts))]
        names = names if len(prompts) > 1 else [param]
        prepared: list[PreparedRequest] = []
        for part in parts_of(prompts, AT_ONCE, len(prompts)):
            prepared += await self.service.llm.prepare_all_pooling(
                part, params, options=self.options, names=names[len(prepared) :][: len(part)]
            )
            await asyncio.sleep(0)  # others' turn
        return prepared

    async def _prompts(self, value: object, param: str) -> list[Prompt]:
        several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
        if isinstance(value, list) and several:
            self.bound(param, value)
        for each in value if isinstance(value, list) and several else [value]:
            if not isinstance(each, str | list):
                allowed = "a text, token ids, or a list of texts or of lists of token ids"
                raise InvalidParameter(param, each, allowed)
        beside = self.service.llm.beside
        return await beside.run(weight(value), parse_prompts, value, param=param)

    def bound(self, param: str, values: Sequence[object]) -> None:
        """Raise InvalidParameter for more inputs than one call may have."""
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
        """Return the answer with ``fields`` and the fields of every answer."""
        content = msgspec.json.encode({**self._around(outputs), **fields})
        return Response(content, media_type="application/json")

    async def reply_data(
        self, outputs: Sequence[PooledRequestOutput], items: Iterable[Sequence[bytes]]
    ) -> Response:
        """Return the answer with a list of ``items``, JSON in parts, that may be long: joining them
        delays no other request."""
        parts = [msgspec.json.encode({**self._around(outputs), "object": "list"})[:-1]]
        parts.append(b',"data":')
        for index, item in enumerate(items):
            parts += (b"," if index else b"[", *item)
        parts.append(b"]}")
        size = sum(map(len, parts))
        content = await self.service.llm.beside.run(size // AT_A_TIME, b"".join, parts)
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
    """Return a worker's refusal of a prompt as one of the client's input."""
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
    """Return JSON of an object with ``fields`` and, under ``name``, the values: base64 of their
    bytes, a list, or a list for each token. Other requests have their turns while it is written."""
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
    """Return lists of ``size`` bytes each, with commas between."""
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
