"""Outputs as messages of gRPC.

A usual step, which has a text and ids and comes once for every token, is written by hand: building
its message and having that serialized takes longer than all else that is done for a token here.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.llm.outputs import (
    CompletionOutput,
    PooledRequestOutput,
    PositionLogprobs,
    RequestOutput,
)
from tandem.router.rpc import tandem_pb2 as pb

_SMALL = [bytes((number,)) for number in range(0x80)]


class StepWriter:
    """Messages of one call, as their bytes."""

    def __init__(self, request_id: str) -> None:
        name = request_id.encode()
        self._head = b"\x0a" + _varint(len(name)) + name

    def step(self, output: RequestOutput) -> bytes:
        """What is new of each choice, and the usage where the call has ended."""
        said = self._head
        for choice in output.outputs:
            is_usual = choice.logprobs is None and choice.finish_reason is None
            body = _usual(choice) if is_usual else _choice(choice).SerializeToString()
            said += b"\x12" + _varint(len(body)) + body
        if output.finished:
            said += pb.GenerateResponse(usage=usage_of(output)).SerializeToString()
        return said


def usage_of(output: RequestOutput) -> pb.Usage:
    """Of a call that ended with ``output``."""
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=output.num_generated_tokens,
        cached_tokens=output.num_cached_tokens or 0,
    )


def pooled_usage(outputs: Iterable[PooledRequestOutput]) -> pb.Usage:
    """Of prompts that were pooled."""
    usage = pb.Usage()
    for each in outputs:
        usage.prompt_tokens += len(each.prompt_token_ids)
        usage.cached_tokens += each.num_cached_tokens
    return usage


def _usual(choice: CompletionOutput) -> bytes:
    """A ``Choice`` of index, text and token ids; as protobuf has it, without what is 0 or empty."""
    said = b"\x08" + _varint(choice.index) if choice.index else b""
    if choice.text:
        text = choice.text.encode()
        said += b"\x12" + _varint(len(text)) + text
    if choice.token_ids:
        ids = b"".join(map(_varint, choice.token_ids))
        said += b"\x1a" + _varint(len(ids)) + ids
    return said


def _varint(number: int) -> bytes:
    if number < 0x80:
        return _SMALL[number]
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _choice(choice: CompletionOutput) -> pb.Choice:
    message = pb.Choice(index=choice.index, text=choice.text, token_ids=choice.token_ids)
    if choice.logprobs is not None:
        message.logprobs.extend(_position(each) for each in choice.logprobs)
    if choice.finish_reason is not None:
        message.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        message.stop_reason = str(choice.stop_reason)
    return message


def _position(logprobs: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(id=token_id, logprob=each.logprob)
            for token_id, each in logprobs.items()
        ]
    )
