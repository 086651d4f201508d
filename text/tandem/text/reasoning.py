"""Sampling parameters for a model that reasons before it answers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams, ThinkingMarks
from tandem.protocol.structured import ReasoningSpan
from tandem.text.tokenizer import Tokenizer

Reasoning = Callable[[str], ReasoningSpan | None]


def with_thinking(
    params: SamplingParams, text: str | None, reasoning: Reasoning | None, tokenizer: Tokenizer
) -> SamplingParams:
    """Return verified ``params`` with the marks of the reasoning that a budget bounds.

    They are left out if the prompt allows no reasoning. ``reasoning`` is None if the model's marks
    are not known.
    """
    budget = params.thinking_token_budget
    if budget is None or budget < 0:
        return params
    if reasoning is None or text is None:
        allowed = "-1: how the model ends its thoughts is not known; see --reasoning-parser"
        raise InvalidParameter("thinking_token_budget", budget, allowed)
    span = reasoning(text)
    if span is None:
        return params
    close = tokenizer.encode(span.close, add_special_tokens=False, param="messages")
    if len(close) != 1:
        allowed = f"-1: {span.close} is not one token of this model"
        raise InvalidParameter("thinking_token_budget", budget, allowed)
    opens = (
        tuple(tokenizer.encode(each, add_special_tokens=False, param="messages"))
        for each in span.opens
    )
    marks = ThinkingMarks(opens=tuple(opens), close=close[0], has_begun=not span.opens)
    return msgspec.structs.replace(params, thinking=marks)


def behind_reasoning(
    params: SamplingParams, text: str | None, reasoning: Reasoning | None
) -> SamplingParams:
    """Return ``params`` whose structured form applies after the reasoning."""
    wanted = params.structured_outputs
    if wanted is None or reasoning is None or text is None:
        return params
    wanted = msgspec.structs.replace(wanted, reasoning=reasoning(text))
    return msgspec.structs.replace(params, structured_outputs=wanted)
