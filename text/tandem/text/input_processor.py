"""Conversion of a client's input to an ``EngineCoreRequest``, with all checks that need no engine.

The router's dispatcher fills the fields of dispatch (``kv``, ``emitted``, attempts).
"""

from __future__ import annotations

import secrets
from collections.abc import (
    Callable,
    Collection,
    Mapping,
    Sequence,
)
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
from tandem.protocol.requests import EngineCoreRequest, check_token_ids
from tandem.protocol.sampling import (
    SEED_BITS,
    SamplingParams,
    ThinkingMarks,
    seeded,
)
from tandem.protocol.structured import ReasoningSpan
from tandem.text.chat_template import ChatOptions
from tandem.text.embeds import check_embeds, kept_embeds
from tandem.text.errors import ContextLengthExceeded
from tandem.text.pieces import check_stopping
from tandem.text.prompts import (
    EmbedsPrompt,
    Prompt,
    PromptLike,
    TextPrompt,
    TokensPrompt,
    parse_prompt,
)
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


BYTES_A_TOKEN = 2
"""Bytes per token below which a text's mean is rare."""


def refuse_oversized(
    text: str, tokenizer: Tokenizer, max_model_len: int, params: SamplingParams, *, param: str
) -> None:
    """Raise ContextLengthExceeded for a text that no tokenization makes short enough.

    Texts are not checked if the tokenizer may drop characters.
    """
    if len(text) <= 4 * max_model_len or not tokenizer.spells_bytes:
        return
    fewest = -(-len(text) // tokenizer.longest_token)
    if fewest > max_model_len:
        raise ContextLengthExceeded(
            param,
            num_prompt_tokens=fewest,
            max_tokens=params.max_tokens,
            max_model_len=max_model_len,
            at_least=True,
        )


def seems_to_fit(text: str, params: SamplingParams, max_model_len: int) -> bool:
    """Return whether a text is not empty and probably fits, without tokenizing it."""
    room = max_model_len - max(params.max_tokens or 1, params.min_tokens)
    if room < 1 or not text.strip():
        return False
    try:
        return len(text.encode()) <= BYTES_A_TOKEN * room
    except UnicodeEncodeError:
        return False


def cut_within_ends(
    ids: list[int],
    keep: int,
    second_text_at: int | None,
    special_ids: Collection[int],
    *,
    from_left: bool,
) -> tuple[list[int], int | None]:
    """Return ``keep`` of ``ids``, including the special tokens at both ends if they fit.

    Also return the new start of the second text (None if nothing of it is left).

    ``ids`` are more than ``keep``, which is at least 1. ``from_left`` drops the beginning of the
    text. ``second_text_at``: first token of the second text, if token types differ.
    """
    head, tail = _leading(ids, special_ids), _leading(ids[::-1], special_ids)
    if head + tail >= keep:
        head = tail = 0
    inner = ids[head : len(ids) - tail]
    dropped = len(ids) - keep
    if from_left:
        cut = [*ids[:head], *inner[dropped:], *ids[len(ids) - tail :]]
    else:
        cut = [*ids[:head], *inner[: len(inner) - dropped], *ids[len(ids) - tail :]]
    if second_text_at is None:
        return cut, None
    at = max(second_text_at - dropped, head) if from_left else min(second_text_at, keep - tail)
    return cut, at if 0 < at < keep else None


def _leading(ids: Sequence[int], special_ids: Collection[int]) -> int:
    count = 0
    while count < len(ids) and ids[count] in special_ids:
        count += 1
    return count


def with_ids(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, *, most_chars: int, add_special_tokens: bool
) -> list[Prompt]:
    """Return ``prompts`` with texts of at most ``most_chars`` characters replaced by ids.

    A text that cannot be tokenized stays: its processing raises the error.
    """
    texts = {
        at: each.text
        for at, each in enumerate(prompts)
        if isinstance(each, TextPrompt) and len(each.text) <= most_chars
    }
    found = list(prompts)
    try:
        encoded = tokenizer.encode_all([*texts.values()], add_special_tokens=add_special_tokens)
    except InvalidParameter:
        return found
    for (at, text), ids in zip(texts.items(), encoded, strict=True):
        if ids:
            found[at] = TokensPrompt(tuple(ids), text)
    return found


def check_spaces(params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raise InvalidParameter if spaces were disabled that the tokenizer adds."""
    without = not (params.spaces_between_special_tokens or params.skip_special_tokens)
    if without and not tokenizer.spells_bytes:
        raise InvalidParameter(
            "spaces_between_special_tokens", False, "true: this model's tokenizer has spaces"
        )


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters with the ids of bad words, at the start of a text and after a space."""
    if not params.bad_words:
        return params
    found = dict.fromkeys(params.bad_words_token_ids)
    for word in params.bad_words:
        bare = word.lstrip() or word
        for form in (bare, f" {bare}"):
            ids = tokenizer.encode(form, add_special_tokens=False, param="bad_words")
            if ids:
                found[tuple(ids)] = None
    return msgspec.structs.replace(params, bad_words_token_ids=tuple(found))


WHOLE_CONTEXT = -1
"""Value of ``truncate_prompt_tokens`` that keeps what fits."""


class TruncationSide(StrEnum):
    """End of a long prompt that is dropped."""

    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Options of a request other than its prompt and its sampling parameters."""

    add_special_tokens: bool | None = None
    """Add the model's BOS and the like; None is yes for texts, no for chats."""
    truncate_prompt_tokens: int | None = None
    """Maximum tokens to keep of the prompt; -1 keeps what fits."""
    truncation_side: TruncationSide | None = None
    """None is left for a prompt that is continued, right for one that is pooled."""
    cache_salt: str | None = None
    """Salt of block hashes: only requests with the same salt share cached prefixes."""
    default_max_tokens: int | None = None
    """Default of ``max_tokens``, at least ``min_tokens``. None: the rest of the context."""
    adapter: str | None = None
    priority: int = 0
    """Priority; lower values are scheduled first."""
    budget_ms: int | None = None
    """Deadline after arrival, in milliseconds; None for no deadline."""
    partial_on_timeout: bool = False
    """Return the tokens at the deadline as the answer instead of an error."""
    seen_special_ids: frozenset[int] = frozenset()
    """Special tokens that the answer's text keeps although it skips others."""
    reasoning: Callable[[str], ReasoningSpan | None] | None = None
    """Function from the prompt's text to the reasoning that may precede an answer."""
    thinks: bool = False
    """Whether ``reasoning`` knows the marks of the model's reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessedInput:
    """Request that can be sent, and its source text."""

    request: EngineCoreRequest
    prompt: str | None
    """Text of the prompt, chat template applied; None if ids were given."""
    seen_special_ids: frozenset[int] = frozenset()
    partial_on_timeout: bool = False


def random_seed() -> int:
    """Return a random seed."""
    return secrets.randbits(SEED_BITS)


class InputProcessor:
    """Processor for one model card. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        card: ModelCard,
        *,
        draw_seed: Callable[[], int] | None = random_seed,
    ) -> None:
        """``draw_seed`` returns seeds of requests without one; None leaves them unset."""
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
        """Return the request of a prompt with verified ``params``.

        Raises InvalidParameter (ContextLengthExceeded).
        """
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
        """Raise what ``process`` would. A text far shorter than the context is not tokenized."""
        parsed, options = parse_prompt(prompt, param=param), options or InputOptions()
        params = self._checked(params, parsed, options)
        words = with_bad_words(params, self.tokenizer)
        words.verify_vocabulary(self.card.vocab_size, self.card.max_logprobs)
        limit = self.card.max_model_len
        if not (isinstance(parsed, TextPrompt) and seems_to_fit(parsed.text, params, limit)):
            self._fitted(parsed, params, None, options, param)

    def check_pooling(self, prompt: PromptLike, *, param: str = "prompt") -> None:
        """Raise what ``process_all_pooling`` would, except errors found by tokenizing."""
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
        """Return the requests of prompts that are pooled, with verified ``pooling``.

        Raises InvalidParameter (ContextLengthExceeded) that names a prompt by its entry in
        ``names``. A truncated text keeps the special tokens around it.
        """
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
        """Return the request of a chat with verified ``params``.

        Raises InvalidParameter (ContextLengthExceeded).
        """
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
        if pooling is None:
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
        """Return a prompt's ids, or placeholders and vectors, checked and truncated. Also return
        the parameters that depend on their number."""
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
        check_stopping(params)
        check_spaces(params, self.tokenizer)
        params = with_thinking(
            params, prompt.text, options.reasoning if options.thinks else None, self.tokenizer
        )
        return behind_reasoning(params, prompt.text, options.reasoning)

    def _embeds(
        self, prompt: EmbedsPrompt, params: SamplingParams, options: InputOptions
    ) -> PromptEmbeds:
        given, param, special = prompt.embeds, prompt.param, options.add_special_tokens
        size = self.card.prompt_embeds
        check_embeds(given, params, param=param, hidden_size=size, add_special_tokens=special)
        kept = tokens_kept(options, self._room(params), self.card.max_model_len)
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
        keep = tokens_kept(options, self._room(params), self.card.max_model_len)
        if keep is None:
            return ids
        return ids[:keep] if options.truncation_side is TruncationSide.RIGHT else ids[-keep:]

    def _room(self, params: SamplingParams) -> int:
        """Return the tokens of a prompt that leave room for the requested answer."""
        return max(self.card.max_model_len - (params.max_tokens or 1), 1)

    def _fit_pooled(
        self, ids: list[int], pooling: PoolingParams, options: InputOptions, param: str
    ) -> tuple[list[int], PoolingParams]:
        limit = self.card.max_model_len
        keep = tokens_kept(options, limit, limit)
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
        if params.min_tokens > most:
            allowed = f"at most max_tokens, which is {most}"
            raise InvalidParameter("min_tokens", params.min_tokens, allowed)
        return msgspec.structs.replace(params, max_tokens=most)

    def _hashes(
        self, ids: list[int], options: InputOptions, embeds: PromptEmbeds | None
    ) -> tuple[BlockHash, ...]:
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
    """Return the tokens that a prompt is truncated to; None does not truncate.

    ``room`` is what fits. Raises InvalidParameter.
    """
    keep = options.truncate_prompt_tokens
    if keep == WHOLE_CONTEXT:
        return room
    if keep is not None and (isinstance(keep, bool) or not 1 <= keep <= max_model_len):
        allowed = f"an integer from 1 to {max_model_len}, or -1 for what fits"
        raise InvalidParameter("truncate_prompt_tokens", keep, allowed)
    return keep


def _value(prompt: Prompt) -> str | list[int]:
    return prompt.text if isinstance(prompt, TextPrompt) else []
