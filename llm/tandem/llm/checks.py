"""A batch is looked through before any of it runs: one bad prompt late in it must not cost the
answers to those before.

What is found here is all but what takes as long as to prepare the request: a text that is far from
too long for the context is not tokenized, and a chat template that the caller brings, which runs in
a process of its own, is not rendered. What is wrong there is seen when its turn comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.sampling import Params
from tandem.protocol.errors import InvalidParameter
from tandem.text.chat_template import ChatOptions
from tandem.text.input_processor import InputOptions
from tandem.text.prompts import PromptLike, TextPrompt

IN_A_ROW = 32
"""Prompts that are looked at until others in the loop have their turn."""

_RENDERED = InputOptions(add_special_tokens=False)


async def check_prompts(
    llm: AsyncLLM, prompts: Sequence[PromptLike], params: Sequence[Params]
) -> None:
    """Raises InvalidParameter that says which of ``prompts`` is not allowed, with its one of
    ``params``."""
    for at, (prompt, given) in enumerate(zip(prompts, params, strict=True)):
        await llm.check(prompt, given, param=name_of("prompt", at, len(prompts)))
        if at % IN_A_ROW == 0:
            await asyncio.sleep(0)


async def check_chats(
    llm: AsyncLLM,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    params: Sequence[Params],
    chat: ChatOptions | None,
) -> None:
    """Raises InvalidParameter that says which of ``chats`` is not allowed, with its one of
    ``params``."""
    if chat is not None and chat.chat_template is not None:
        return
    for at, (messages, given) in enumerate(zip(chats, params, strict=True)):
        name = name_of("messages", at, len(chats))
        try:
            text = await llm.render_chat(messages, chat)
        except InvalidParameter as error:
            param = error.param.replace("messages", name, 1)
            raise InvalidParameter(param, error.value, error.allowed) from error
        await llm.check(TextPrompt(text), given, options=_RENDERED, param=name)
        if at % IN_A_ROW == 0:
            await asyncio.sleep(0)


def name_of(param: str, index: int, count: int) -> str:
    """What errors call one of ``count`` that came in ``param``."""
    return f"{param}[{index}]" if count > 1 else param
