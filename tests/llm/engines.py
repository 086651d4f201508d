"""An ``LLMEngine`` over a client that says what a test has it say."""

from __future__ import annotations

from typing import Any

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.llm_engine import LLMEngine
from tandem.text.tokenizer import Tokenizer

SECONDS = 60.0
"""For an engine that has something to say: a slow machine is no fault."""


def engine_over(client: Any, tokenizer: Tokenizer) -> LLMEngine:
    """An engine whose AsyncLLM is built in the engine's own loop."""

    async def make() -> AsyncLLM:
        return AsyncLLM(client, tokenizer)

    return LLMEngine(make)
