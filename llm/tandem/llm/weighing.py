"""How long a request takes to be prepared, in characters of text: long ones are prepared beside the
event loop (``beside``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.llm.beside import IN_LOOP, weight
from tandem.llm.sampling import Params
from tandem.text.chat_template import ChatOptions
from tandem.text.prompts import EmbedsPrompt, PromptLike, TextPrompt, TokensPrompt

BAD_WORD_COSTS = 30
"""Of a bad word, in characters: it is tokenized twice."""

PROMPT_COSTS = 200
"""Of a prompt that is pooled, in characters, whatever its length."""

MOST_TOGETHER = 32
"""Prompts that are prepared together, at most: others wait no longer for them than for a long
one."""

CHARACTERS_A_TOKEN = 4
"""Of English text; where a character is a token, so much more of a batch is in an engine."""


def prompt_weight(prompt: PromptLike) -> int:
    """Of a prompt: its text, or a character for each id or byte."""
    if isinstance(prompt, TextPrompt):
        return len(prompt.text)
    if isinstance(prompt, EmbedsPrompt):
        return len(prompt.embeds.values)
    return len(prompt.token_ids) if isinstance(prompt, TokensPrompt) else weight(prompt)


def prompt_tokens(prompt: PromptLike) -> int:
    """About how many tokens a prompt has, at least 1: its ids, or a text's characters by four."""
    if isinstance(prompt, TokensPrompt):
        return max(1, len(prompt.token_ids))
    return max(1, prompt_weight(prompt) // CHARACTERS_A_TOKEN)


def parts_of(prompts: Sequence[PromptLike], tokens: int, most: int) -> Iterator[list[PromptLike]]:
    """``prompts`` in their order, in parts that are prepared together: of about ``tokens`` tokens
    each, and of at most ``most`` prompts and ``MOST_TOGETHER``."""
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
    """A template that a request brings runs in a process of its own, and is waited for."""
    if chat is None:
        return weight(messages)
    if chat.chat_template is not None:
        return IN_LOOP
    return weight(messages) + weight([chat.template_kwargs, chat.tools, chat.documents])


def params_weight(params: Params) -> int:
    """Of sampling parameters as callers write them."""
    if not isinstance(params, Mapping):
        return 0
    words = params.get("bad_words") or ()
    return weight(list(params.values())) + BAD_WORD_COSTS * len(words)
