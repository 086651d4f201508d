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


def step_message(request_id: str, output: RequestOutput) -> bytes:
    """Return the new part of each choice, and the usage if the call has ended."""
    message = pb.GenerateResponse(request_id=request_id)
    for choice in output.outputs:
        _add_choice(message, choice)
    if output.finished:
        message.usage.prompt_tokens = len(output.prompt_token_ids)
        message.usage.completion_tokens = output.num_generated_tokens
        message.usage.cached_tokens = output.num_cached_tokens or 0
    return message.SerializeToString()


def pooled_usage(outputs: Iterable[PooledRequestOutput]) -> pb.Usage:
    """Return the usage of prompts that were pooled."""
    usage = pb.Usage()
    for each in outputs:
        usage.prompt_tokens += len(each.prompt_token_ids)
        usage.cached_tokens += each.num_cached_tokens
    return usage


def _add_choice(message: pb.GenerateResponse, choice: CompletionOutput) -> None:
    added = message.choices.add(index=choice.index, text=choice.text, token_ids=choice.token_ids)
    if choice.logprobs is not None:
        added.logprobs.extend(_position(each) for each in choice.logprobs)
    if choice.finish_reason is not None:
        added.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        added.stop_reason = str(choice.stop_reason)


def _position(logprobs: PositionLogprobs) -> pb.PositionLogprobs:
    return pb.PositionLogprobs(
        tokens=[
            pb.TokenLogprob(id=token_id, logprob=each.logprob)
            for token_id, each in logprobs.items()
        ]
    )
