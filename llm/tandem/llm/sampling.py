"""Sampling parameters from nothing, a mapping, or a struct.

Open values come from the model's generation_config.json, as in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.llm import params
from tandem.llm.cpu_pool import IN_LOOP, weight
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams, from_mapping
from tandem.text.chat_template import ChatOptions
from tandem.text.input_processor import ProcessedInput
from tandem.text.prompts import (
    EmbedsPrompt,
    PromptLike,
    TextPrompt,
    TokensPrompt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """Request that passed every check and was not sent yet."""

    request_id: str
    processed: ProcessedInput


class Running:
    """Requests that were sent and have not ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, PreparedRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def take(self, prepared: PreparedRequest) -> None:
        """Add a request. Raises InvalidParameter if another one has its id."""
        if prepared.request_id in self._by_id:
            raise InvalidParameter(
                "request_id", prepared.request_id, "an id that no running request has"
            )
        self._by_id[prepared.request_id] = prepared

    def free(self, prepared: PreparedRequest) -> None:
        """Remove a request, unless another one has its id."""
        if self._by_id.get(prepared.request_id) is prepared:
            del self._by_id[prepared.request_id]


logger = logging.getLogger(__name__)

_FROM_GENERATION = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Names of fields of generation_config.json here."""


Params = SamplingParams | Mapping[str, Any] | None
"""Sampling parameters as callers write them."""


def defaults_of(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's own defaults, with warnings for invalid ones."""
    found: dict[str, Any] = {}
    for theirs, ours in _FROM_GENERATION.items():
        value = generation.get(theirs)
        if value is None:
            continue
        try:
            from_mapping({ours: value})
        except InvalidParameter as error:
            logger.warning("generation_config.json: %s is left out: %s", theirs, error)
        else:
            found[ours] = value
    return found


def params_from(
    given: SamplingParams | Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Return verified parameters. A struct is complete; a mapping is filled with defaults.

    ``stop`` and ``bad_words`` may be single strings. Raises InvalidParameter.
    """
    if isinstance(given, params.SamplingParams):
        return params.wire(given)
    if isinstance(given, SamplingParams):
        return given.verify()
    fields = {**(defaults or {}), **(given or {})}
    for name in ("stop", "bad_words"):
        value = fields.get(name)
        if isinstance(value, str):
            fields[name] = (value,)
        elif value is None:
            fields.pop(name, None)
    return from_mapping(fields)


BAD_WORD_COSTS = 30
"""Cost of a bad word, in characters."""

PROMPT_COSTS = 200
"""Additional cost of a pooled prompt, in characters."""

MOST_TOGETHER = 32
"""Maximum prompts that are prepared together."""

CHARACTERS_A_TOKEN = 4
"""Characters per token of English text."""


def prompt_weight(prompt: PromptLike) -> int:
    """Return the cost of a prompt: its characters, or one for each id or byte."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, EmbedsPrompt):
        return len(prompt.embeds.values)
    return len(prompt.token_ids) if isinstance(prompt, TokensPrompt) else weight(prompt)


def prompt_tokens(prompt: PromptLike) -> int:
    """Return the approximate tokens of a prompt, at least 1."""
    if isinstance(prompt, TokensPrompt):
        return max(1, len(prompt.token_ids))
    return max(1, prompt_weight(prompt) // CHARACTERS_A_TOKEN)


def parts_of(prompts: Sequence[PromptLike], tokens: int, most: int) -> Iterator[list[PromptLike]]:
    """Yield ``prompts`` in parts that are prepared together.

    A part has about ``tokens`` tokens, and at most ``most`` and ``MOST_TOGETHER`` prompts.
    """
    most = min(most, MOST_TOGETHER)
    part: list[PromptLike] = []
    left = tokens
    for prompt in prompts:
        weight = prompt_tokens(prompt)
        if part and (weight > left or len(part) == most):
            yield part
            part, left = [], tokens
        part.append(prompt)
        left -= weight
    if part:
        yield part


def chat_weight(messages: Sequence[Mapping[str, Any]], chat: ChatOptions | None) -> int:
    """Return the cost of a chat; its own template runs in another process."""
    if chat is None:
        return weight(messages)
    if chat.chat_template is not None:
        return IN_LOOP
    return weight(messages) + weight([chat.template_kwargs, chat.tools, chat.documents])


def params_weight(params: Params) -> int:
    """Return the cost of sampling parameters."""
    if not isinstance(params, Mapping):
        return 0
    words = params.get("bad_words") or ()
    return weight(list(params.values())) + BAD_WORD_COSTS * len(words)
