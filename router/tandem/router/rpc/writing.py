"""Outputs as messages of gRPC."""

from __future__ import annotations

from collections.abc import Iterable

from tandem.llm.outputs import (
    CompletionOutput,
    PooledRequestOutput,
    PositionLogprobs,
    RequestOutput,
)
from tandem.router.rpc import tandem_pb2 as pb


def step_of(request_id: str, output: RequestOutput) -> pb.GenerateResponse:
    """What is new of each choice."""
    return pb.GenerateResponse(
        request_id=request_id, choices=[_choice(each) for each in output.outputs]
    )


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
