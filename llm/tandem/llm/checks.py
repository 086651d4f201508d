"""Checks of a batch before any of it runs.

Short texts are not tokenized, and callers' templates are not rendered: such errors are raised
later.
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
"""Prompts that are checked before other tasks may run."""

_RENDERED = InputOptions(add_special_tokens=False)


async def check_prompts(
    llm: AsyncLLM, prompts: Sequence[PromptLike], params: Sequence[Params]
) -> None:
    """Raise InvalidParameter for the first of ``prompts`` that is not allowed with its
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
    """Raise InvalidParameter for the first of ``chats`` that is not allowed with its ``params``."""
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
    """Return the name of an item of ``param``, for errors."""
    return f"{param}[{index}]" if count > 1 else param
