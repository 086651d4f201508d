"""Texts and token ids of a model, made by its tokenizer only, without an engine.

The part of ``AsyncLLM`` that needs no client. Long work runs outside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tandem.llm.beside import Beside
from tandem.llm.weighing import chat_weight
from tandem.protocol.recording import marked
from tandem.text.chat_template import ChatOptions
from tandem.text.tokenizer import Tokenizer

_Result = TypeVar("_Result")


class Texts:
    """Tokenizer calls of one model. All methods belong to one event loop."""

    def __init__(self, tokenizer: Tokenizer, beside: Beside) -> None:
        self.tokenizer = tokenizer
        self.beside = beside
        """Executor of long work."""

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], chat: ChatOptions | None = None
    ) -> str:
        """Return a chat's text, as ``chat`` would tokenize it. Raises InvalidParameter."""
        return await self.beside.run(
            chat_weight(messages, chat), self.tokenizer.render_chat, messages, chat
        )

    async def encode_pair(
        self,
        first: str,
        second: str,
        *,
        params: tuple[str, str],
        keep: int | None = None,
        from_left: bool = False,
    ) -> tuple[list[int], int | None]:
        """Return the ids of two texts as one prompt, joined as the tokenizer joins pairs. Also
        return the position at which tokens of the second text's type begin. The second text is cut
        to fit ``keep`` ids of both. InvalidParameter names a text by ``params``."""
        return await self.beside.run(
            len(first) + len(second),
            self.tokenizer.encode_pair,
            first,
            second,
            params=params,
            keep=keep,
            from_left=from_left,
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text. A long one is tokenized outside the event loop."""
        return await self.beside.run(
            len(text), self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat: ChatOptions | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Return the ids of a chat, as ``chat`` would send them."""
        tokenizer = self.tokenizer

        def encoded() -> list[int]:
            text = tokenizer.render_chat(messages, chat)
            return tokenizer.encode(text, add_special_tokens=add_special_tokens, param="messages")

        return await self.beside.run(chat_weight(messages, chat), encoded)

    async def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = True, param: str | None = None
    ) -> str:
        """Return the text of ids, decoded as a separate text.

        With ``param``, unknown ids raise InvalidParameter with that name.
        """

        def decoded() -> str:
            if param is not None:
                self.tokenizer.check_known(ids, param)
            return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

        return await self.beside.run(len(ids), decoded)

    async def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        tokenizer = self.tokenizer
        return await self.beside.run(
            len(ids) * 4, lambda: [tokenizer.token_text(token) for token in ids]
        )

    async def _tokenized(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Return the result of ``work``, which tokenizes and has that ``size``."""
        with marked("tokenize"):
            return await self.beside.run(size, work)
