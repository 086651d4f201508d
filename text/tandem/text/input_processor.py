"""Turns what a client asks into an ``EngineCoreRequest``: ids, checked parameters, block hashes.

Everything that can be refused without an engine is refused here, so that no worker sees it: the
length against the context, ids against the vocabulary, the range of every parameter. Dispatch
fields (``kv``, ``emitted``, attempts) stay empty; the router's dispatcher fills them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from tandem.protocol.card import ModelCard
from tandem.protocol.embeds import PLACEHOLDER, PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.hashing import hash_blocks, root_hash
from tandem.protocol.ids import BlockHash, RequestKey
from tandem.protocol.pooling import NO_SAMPLING, PoolingParams
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import SEED_BITS, SamplingParams, seeded
from tandem.protocol.structured import ReasoningSpan
from tandem.protocol.token_ids import check_token_ids
from tandem.text.batches import with_ids
from tandem.text.chat_template import ChatOptions
from tandem.text.cutting import cut_within_ends
from tandem.text.embeds.checks import check_embeds, kept_embeds
from tandem.text.errors import ContextLengthExceeded
from tandem.text.fitting import refuse_oversized, seems_to_fit
from tandem.text.params import check_spaces, with_bad_words
from tandem.text.prompts import (
    EmbedsPrompt,
    Prompt,
    PromptLike,
    TextPrompt,
    TokensPrompt,
    parse_prompt,
)
from tandem.text.reasoning import behind_reasoning, with_thinking
from tandem.text.stop_strings import check_stopping
from tandem.text.tokenizer import Tokenizer

WHOLE_CONTEXT = -1
"""What clients write in ``truncate_prompt_tokens`` for "as much as fits"."""


class TruncationSide(StrEnum):
    """Which end of a long prompt is dropped."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """What a request says beside its prompt and its sampling parameters."""

    add_special_tokens: bool | None = None
    """Add the model's BOS and the like; None is yes for texts, no for chats (templates do)."""
    truncate_prompt_tokens: int | None = None
    """Keep this many tokens of a longer prompt; -1 keeps what fits."""
    truncation_side: TruncationSide | None = None
    """None is the left of a prompt that is continued, and the right of one that is pooled."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    default_max_tokens: int | None = None
    """Tokens of an answer whose parameters bound none: fewer where the context holds no more, more
    where ``min_tokens`` asks for them; None is what the context holds."""
    adapter: str | None = None
    priority: int = 0
    """Lower goes first under the priority policy."""
    budget_ms: int | None = None
    """Deadline of the whole request, from when it came in, or is sent where nobody knows that; None
    is none."""
    partial_on_timeout: bool = False
    """What was drawn by the deadline is the answer; otherwise passing it is an error."""
    seen_special_ids: frozenset[int] = frozenset()
    """Special tokens that stand in the answer's text though others are skipped."""
    reasoning: Callable[[str], ReasoningSpan | None] | None = None
    """What may stand before an answer, by the prompt's text: None for nothing."""
    thinks: bool = False
    """Whether ``reasoning`` knows how the model marks what it thinks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedInput:
    """A request that can be sent, and the text it was made from."""

    request: EngineCoreRequest
    prompt: str | None
    """Text of the prompt, chat template applied; None where the client gave ids alone."""
    seen_special_ids: frozenset[int] = frozenset()
    """See InputOptions."""
    partial_on_timeout: bool = False
    """See InputOptions."""


def random_seed() -> int:
    """Another one in each process."""
    return secrets.randbits(SEED_BITS)


class InputProcessor:
    """For one model as its card describes it. Holds no state of requests; any thread may call."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        card: ModelCard,
        *,
        draw_seed: Callable[[], int] | None = random_seed,
    ) -> None:
        """``draw_seed`` gives the seeds of requests that bring none; None leaves them open."""
        self.tokenizer = tokenizer
        self.card = card
        self._draw_seed = draw_seed
        self._fingerprint = card.fingerprint.digest
        self._eos = tuple(each for each in tokenizer.eos_token_ids if each < card.vocab_size)

    def process(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        key: RequestKey,
        options: InputOptions | None = None,
    ) -> ProcessedInput:
        """The request of a prompt. Raises InvalidParameter (ContextLengthExceeded)."""
        return self._process(
            parse_prompt(prompt), params, key, options or InputOptions(), param="prompt"
        )

    def check(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        options: InputOptions | None = None,
        *,
        param: str = "prompt",
    ) -> None:
        """Raise what ``process`` would, calling the prompt by ``param``. A text that is far from
        too long is not tokenized."""
        parsed, options = parse_prompt(prompt, param=param), options or InputOptions()
        params = self._checked(params, parsed, options)
        words = with_bad_words(params, self.tokenizer)
        words.verify_vocabulary(self.card.vocab_size, self.card.max_logprobs)
        limit = self.card.max_model_len
        if not (isinstance(parsed, TextPrompt) and seems_to_fit(parsed.text, params, limit)):
            self._fitted(parsed, params, None, options, param)

    def check_pooling(self, prompt: PromptLike, *, param: str = "prompt") -> None:
        """Raise what ``process_all_pooling`` would of a prompt, but for a text that would have to
        be tokenized for it."""
        parsed = parse_prompt(prompt, param=param)
        try:
            if isinstance(parsed, TextPrompt):
                limit = self.card.max_model_len
                refuse_oversized(parsed.text, self.tokenizer, limit, NO_SAMPLING, param=param)
            else:
                self._fitted(parsed, NO_SAMPLING, PoolingParams(), InputOptions(), param)
        except ContextLengthExceeded as error:
            raise error.of_a_prompt(param) from None

    def process_all_pooling(
        self,
        prompts: Sequence[PromptLike],
        pooling: PoolingParams,
        keys: Sequence[RequestKey],
        options: InputOptions | None = None,
        *,
        names: Sequence[str] = (),
    ) -> list[ProcessedInput]:
        """The requests of prompts that are pooled, by verified ``pooling``. Raises InvalidParameter
        (ContextLengthExceeded) that calls a prompt by its one of ``names``, or "prompt". What a
        tokenizer puts around a text stays where the text is cut."""
        options = options or InputOptions()
        names = names or ("prompt",) * len(prompts)
        parsed = with_ids(
            [parse_prompt(each, param=name) for each, name in zip(prompts, names, strict=True)],
            self.tokenizer,
            most_chars=max(4, self.tokenizer.longest_token) * self.card.max_model_len,
            add_special_tokens=options.add_special_tokens is not False,
        )
        found = []
        for prompt, key, name in zip(parsed, keys, names, strict=True):
            try:
                one = self._process(prompt, NO_SAMPLING, key, options, param=name, pooling=pooling)
            except ContextLengthExceeded as error:
                raise error.of_a_prompt(name) from None
            found.append(one)
        return found

    def process_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        key: RequestKey,
        options: InputOptions | None = None,
        chat: ChatOptions | None = None,
    ) -> ProcessedInput:
        """The request of a chat. Raises InvalidParameter (ContextLengthExceeded)."""
        options = options or InputOptions()
        if options.add_special_tokens is None:
            options = replace(options, add_special_tokens=False)
        prompt = TextPrompt(self.tokenizer.render_chat(messages, chat))
        return self._process(prompt, params, key, options, param="messages")

    def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        key: RequestKey,
        options: InputOptions,
        *,
        param: str,
        pooling: PoolingParams | None = None,
    ) -> ProcessedInput:
        if pooling is None:  # NO_SAMPLING needs none of this
            params = self._checked(params, prompt, options)
        ids, embeds, params, pooling = self._fitted(prompt, params, pooling, options, param)
        if pooling is None:
            if self._draw_seed is not None:
                params = seeded(params, self._draw_seed())
            params = with_bad_words(params, self.tokenizer)
            params.verify_vocabulary(self.card.vocab_size, self.card.max_logprobs)
            params = params.with_all_logprobs(self.card.vocab_size)
        request = EngineCoreRequest(
            key=key,
            prompt_token_ids=ids,
            params=params,
            eos_token_ids=self._eos,
            block_hashes=self._hashes(ids, options, embeds),
            prompt_embeds=embeds,
            cache_salt=options.cache_salt,
            adapter=options.adapter,
            priority=options.priority,
            budget_ms=options.budget_ms,
            pooling=pooling,
        )
        return ProcessedInput(
            request=request,
            prompt=prompt.text,
            seen_special_ids=options.seen_special_ids,
            partial_on_timeout=options.partial_on_timeout,
        )

    def _fitted(
        self,
        prompt: Prompt,
        params: SamplingParams,
        pooling: PoolingParams | None,
        options: InputOptions,
        param: str,
    ) -> tuple[list[int], PromptEmbeds | None, SamplingParams, PoolingParams | None]:
        """A prompt's ids, or placeholders and vectors, checked and cut to what is kept of them; and
        the parameters with what hangs on their number."""
        if isinstance(prompt, EmbedsPrompt):
            if pooling is not None:
                allowed = "a text or token ids: nothing is pooled of embeddings"
                raise InvalidParameter(param, prompt.embeds.shape_text, allowed)
            embeds = self._embeds(prompt, params, options)
            ids = [PLACEHOLDER] * embeds.num_tokens
            return ids, embeds, self._fit(params, len(ids), prompt.param, options), None
        ids = self._ids(prompt, params, options, param)
        if pooling is not None:
            ids, pooling = self._fit_pooled(ids, pooling, options, param)
            return ids, None, params, pooling
        ids = self._truncate(ids, params, options)
        return ids, None, self._fit(params, len(ids), param, options), None

    def _checked(
        self, params: SamplingParams, prompt: Prompt, options: InputOptions
    ) -> SamplingParams:
        """Verified parameters, with what they mean of this model's thoughts."""
        params.verify()
        check_stopping(params)
        check_spaces(params, self.tokenizer)
        params = with_thinking(
            params, prompt.text, options.reasoning if options.thinks else None, self.tokenizer
        )
        return behind_reasoning(params, prompt.text, options.reasoning)

    def _embeds(
        self, prompt: EmbedsPrompt, params: SamplingParams, options: InputOptions
    ) -> PromptEmbeds:
        """The vectors of a prompt, checked, and cut if that is asked for."""
        given, param, special = prompt.embeds, prompt.param, options.add_special_tokens
        size = self.card.prompt_embeds
        check_embeds(given, params, param=param, hidden_size=size, add_special_tokens=special)
        kept = self._kept(options, self._room(params))
        from_left = options.truncation_side is not TruncationSide.RIGHT
        embeds = kept_embeds(given, kept, from_left=from_left)
        self._fit(params, embeds.num_tokens, param, options)
        embeds.verify_values(param)
        return embeds

    def _ids(
        self,
        prompt: TextPrompt | TokensPrompt,
        params: SamplingParams,
        options: InputOptions,
        param: str,
    ) -> list[int]:
        if isinstance(prompt, TextPrompt):
            if options.truncate_prompt_tokens is None:
                refuse_oversized(
                    prompt.text, self.tokenizer, self.card.max_model_len, params, param=param
                )
            special = options.add_special_tokens is not False
            ids = self.tokenizer.encode(prompt.text, add_special_tokens=special, param=param)
        else:
            check_token_ids(param, prompt.token_ids, self.card.vocab_size)
            ids = list(prompt.token_ids)
        if not ids:
            raise InvalidParameter(param, _value(prompt), "a prompt of at least one token")
        return ids

    def _truncate(self, ids: list[int], params: SamplingParams, options: InputOptions) -> list[int]:
        keep = self._kept(options, self._room(params))
        if keep is None:
            return ids
        return ids[:keep] if options.truncation_side is TruncationSide.RIGHT else ids[-keep:]

    def _room(self, params: SamplingParams) -> int:
        """Tokens of a prompt that fit before what is to be generated."""
        return max(self.card.max_model_len - (params.max_tokens or 1), 1)

    def _kept(self, options: InputOptions, room: int) -> int | None:
        """Tokens that a prompt is cut to; None cuts none."""
        return tokens_kept(options, room, self.card.max_model_len)

    def _fit_pooled(
        self, ids: list[int], pooling: PoolingParams, options: InputOptions, param: str
    ) -> tuple[list[int], PoolingParams]:
        """A prompt that is pooled, cut if that is asked for; it may take the whole context."""
        limit = self.card.max_model_len
        keep = self._kept(options, limit)
        if keep is not None and keep < len(ids):
            from_left = options.truncation_side is TruncationSide.LEFT
            ids, at = cut_within_ends(
                ids, keep, pooling.second_text_at, self.tokenizer.special_ids, from_left=from_left
            )
            pooling = msgspec.structs.replace(pooling, second_text_at=at)
        if len(ids) > limit:
            raise ContextLengthExceeded(
                param, num_prompt_tokens=len(ids), max_tokens=None, max_model_len=limit
            )
        return ids, pooling

    def _fit(
        self, params: SamplingParams, num_prompt: int, param: str, options: InputOptions
    ) -> SamplingParams:
        """The parameters with max_tokens filled in, or an error that names all lengths."""
        room = self.card.max_model_len - num_prompt
        if room < 1 or (params.max_tokens or 1) > room:
            raise ContextLengthExceeded(
                param if room < 1 else "max_tokens",
                num_prompt_tokens=num_prompt,
                max_tokens=params.max_tokens,
                max_model_len=self.card.max_model_len,
            )
        if params.max_tokens is not None:
            return params
        usual = options.default_max_tokens
        most = room if usual is None else min(room, max(usual, params.min_tokens))
        return msgspec.structs.replace(params, max_tokens=most).verify()

    def _hashes(
        self, ids: list[int], options: InputOptions, embeds: PromptEmbeds | None
    ) -> tuple[BlockHash, ...]:
        """None where nobody caches what they would be found by."""
        if not self.card.prefix_caching:
            return ()
        block_size = self.card.block_size
        root = root_hash(
            fingerprint=self._fingerprint,
            block_size=block_size,
            adapter=options.adapter,
            salt=options.cache_salt,
        )
        return tuple(hash_blocks(root, ids, block_size, embeds))


def tokens_kept(options: InputOptions, room: int, max_model_len: int) -> int | None:
    """Return how many tokens a prompt is cut to, ``room`` for what fits; None cuts none. Raises
    InvalidParameter."""
    keep = options.truncate_prompt_tokens
    if keep == WHOLE_CONTEXT:
        return room
    if keep is not None and (isinstance(keep, bool) or not 1 <= keep <= max_model_len):
        allowed = f"an integer from 1 to {max_model_len}, or -1 for what fits"
        raise InvalidParameter("truncate_prompt_tokens", keep, allowed)
    return keep


def _value(prompt: Prompt) -> str | list[int]:
    """A prompt without tokens as its client wrote it."""
    return prompt.text if isinstance(prompt, TextPrompt) else []
