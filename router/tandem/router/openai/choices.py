"""Choices of completions: numbered over all prompts, with the prompt before them if requested.

Keeps the state over the chunks of a choice. Made by ``completions`` for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.llm.async_llm import AsyncLLM
from tandem.llm.outputs import CompletionOutput, RequestOutput
from tandem.llm.prepared import PreparedRequest
from tandem.router.openai.answers.logprobs import completion_logprobs, joined
from tandem.router.openai.bodies.schemas import CompletionBody
from tandem.router.openai.generate import without_tokens
from tandem.text.offsets import AnswerOffsets, EchoedPrompt
from tandem.text.tokenizer import Tokenizer


class Choices:
    """The choices of one call."""

    def __init__(
        self, tokenizer: Tokenizer, body: CompletionBody, echoed: Sequence[EchoedPrompt]
    ) -> None:
        """Store the echoes; ``echoed`` is one per prompt, or nothing without echo."""
        self._tokenizer = tokenizer
        self._body = body
        self._echoed = echoed
        self._offsets: dict[int, AnswerOffsets] = {}
        self._shown: dict[int, int] = {}
        """Characters of each choice that were rendered."""

    def index(self, prompt: int, choice: CompletionOutput) -> int:
        """Place of a choice among those of all prompts."""
        return prompt * (self._body.n or 1) + choice.index

    def is_first(self, prompt: int, choice: CompletionOutput) -> bool:
        """Return whether no part of the choice was rendered so far."""
        return self.index(prompt, choice) not in self._shown

    def shown(self, choice: CompletionOutput) -> CompletionOutput:
        """Return the choice, without its tokens when only the prompt is requested."""
        return without_tokens(choice) if self._body.prompt_only else choice

    def render(
        self, prompt: int, choice: CompletionOutput, output: RequestOutput
    ) -> tuple[str, dict[str, Any] | None]:
        """Return text and logprobs, the echoed prompt before the first of a choice."""
        index = self.index(prompt, choice)
        echoed = self._echoed[prompt] if self._echoed and index not in self._shown else None
        text = choice.text if echoed is None else echoed.text + choice.text
        self._shown[index] = self._shown.get(index, 0) + len(text)
        if choice.logprobs is None:
            return text, None
        logprobs = completion_logprobs(choice.logprobs, self._places(prompt, choice, output))
        if echoed is None:
            return text, logprobs
        first = self._tokenizer.token_text(output.prompt_token_ids[0])
        before = completion_logprobs(output.prompt_logprobs or [], echoed.offsets, first)
        return text, joined(before, logprobs)

    def _places(self, prompt: int, choice: CompletionOutput, output: RequestOutput) -> list[int]:
        """Return the text offsets of the tokens of ``choice``; at most the end of an ended text."""
        index = self.index(prompt, choice)
        if index not in self._offsets:
            self._offsets[index] = AnswerOffsets(
                self._tokenizer,
                skip_special_tokens=self._body.skip_special_tokens is not False,
                context=self._tokenizer.letter if output.is_embeds else output.prompt_token_ids,
                start=len(self._echoed[prompt].text) if self._echoed else 0,
            )
        ids = choice.token_ids[: len(choice.logprobs or ())]
        places = self._offsets[index].place(ids)
        if choice.finish_reason is None:
            return places
        return [min(place, self._shown[index]) for place in places]


async def choices_of(
    llm: AsyncLLM, body: CompletionBody, prepared: Sequence[PreparedRequest]
) -> Choices:
    """Return the choices of a call that begins."""
    echoed = [await _echoed(llm, body, each) for each in prepared] if body.echo else []
    return Choices(llm.tokenizer, body, echoed)


async def _echoed(llm: AsyncLLM, body: CompletionBody, prepared: PreparedRequest) -> EchoedPrompt:
    """Return a prompt as it is shown. The offsets of its tokens are for log-probabilities alone. A
    text that was not cut is shown unchanged: nothing is tokenized again for it."""
    text = prepared.processed.prompt
    if text is not None and body.logprobs is None and body.truncate_prompt_tokens is None:
        return EchoedPrompt(text, [])
    return await llm.echo(prepared)
