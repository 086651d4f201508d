"""What a request asks of its logits beyond the temperature and the filters: the rules of one row.

Most requests ask nothing and have no rules; a batch without any pays nothing for these stages.
Bad words look at the output alone: a word that began in the prompt was not said by the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.sample.thoughts import Thought
from tandem.protocol.sampling import SamplingParams


class BadWords:
    """Sequences whose last token is not drawn after the others; falsy when there are none. A step
    costs a look-up per length and not per word."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.lookback = 0
        """Output tokens that must be known: one less than the longest word has."""
        self._always = torch.tensor(
            sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64
        )
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """By the number of tokens before the last, then by these."""
        for word in words:
            if len(word) > 1:
                ends = self._after.setdefault(len(word) - 1, {})
                ends.setdefault(word[:-1], []).append(word[-1])
                self.lookback = max(self.lookback, len(word) - 1)

    def __bool__(self) -> bool:
        return bool(self._after) or self._always.numel() > 0

    def forbidden(self, tail: Sequence[int]) -> Tensor:
        """int64: the tokens that would complete a word after the output's last tokens."""
        ends = [
            end
            for length, words in self._after.items()
            for end in words.get(tuple(tail[-length:]), ())
        ]
        if not ends:
            return self._always
        return torch.cat([self._always, torch.tensor(ends, dtype=torch.int64)])


_ROOM = 64
"""Tokens that a fresh row has room for; doubled when full."""


class SeenTokens:
    """Distinct tokens of a row and how often each was emitted, 0 for those that only the prompt
    has. A step costs one addition and not a recount."""

    def __init__(self, prompt: Iterable[int], output: Iterable[int]) -> None:
        counts = Counter(output)
        counts.update(dict.fromkeys(prompt, 0))
        self._slots = {token: slot for slot, token in enumerate(counts)}
        room = max(_ROOM, 2 * len(counts))
        self._tokens = torch.zeros(room, dtype=torch.int64)
        self._counts = torch.zeros(room, dtype=torch.float32)
        self._tokens[: len(counts)] = torch.tensor(list(counts), dtype=torch.int64)
        self._counts[: len(counts)] = torch.tensor(list(counts.values()), dtype=torch.float32)

    @property
    def tokens(self) -> Tensor:
        """int64 [distinct]; valid until the next ``add``."""
        return self._tokens[: len(self._slots)]

    @property
    def counts(self) -> Tensor:
        """float32 [distinct], parallel to ``tokens``."""
        return self._counts[: len(self._slots)]

    def add(self, token: int) -> None:
        """The token was emitted once more."""
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            self._make_room(slot)
            self._tokens[slot] = token
        self._counts[slot] += 1

    def copy(self) -> SeenTokens:
        """A copy that tokens are added to apart."""
        other = SeenTokens((), ())
        other._slots = self._slots.copy()
        other._tokens, other._counts = self._tokens.clone(), self._counts.clone()
        return other

    def _make_room(self, slot: int) -> None:
        if slot == self._tokens.numel():
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])


@dataclass(slots=True)
class RowRules:
    """Rules of one row, and of its tokens what they need."""

    allowed: Tensor | None
    """int64: the only tokens that may be drawn; None allows all."""
    bad_words: BadWords
    tail: list[int]
    """The last output tokens, as many as the longest bad word can look back on."""
    min_tokens: int
    end_ids: Tensor
    """int64: what may not be drawn before ``min_tokens``."""
    bias: tuple[Tensor, Tensor] | None
    """int64 tokens and float32 numbers to add to their logits."""
    seen: SeenTokens | None
    """For the penalties; None where they are off."""
    thought: Thought | None
    """What the model thinks, as long as it may have to be ended."""

    @property
    def looks_back(self) -> bool:
        """Whether what a draw may be depends on the tokens before it."""
        return self.seen is not None or self._lookback > 0 or self.thought is not None

    @property
    def needs_tokens(self) -> bool:
        """Whether the next draw needs every token before it on the host."""
        unseen = self.thought is not None and self.thought.may_end_unseen
        return self.seen is not None or self._lookback > 0 or unseen

    @property
    def allowed_now(self) -> Tensor | None:
        """int64: the only tokens that this draw may be; None allows all."""
        forced = None if self.thought is None else self.thought.forced
        return self.allowed if forced is None else forced

    def applies(self, position: int) -> bool:
        """Whether there is anything to do for the draw at this output position."""
        lasting = self.bad_words or self.allowed_now is not None or self.bias is not None
        return bool(lasting) or self.seen is not None or self.holds_back_end(position)

    def holds_back_end(self, position: int) -> bool:
        """Whether the output is still too short to end."""
        return position < self.min_tokens and self.end_ids.numel() > 0

    def forbidden_words(self) -> Tensor:
        """int64: the tokens that would complete a bad word now."""
        return self.bad_words.forbidden(self.tail)

    def extend(self, tokens: Sequence[int]) -> None:
        """The row's output went on by these tokens."""
        if self._lookback:
            self.tail = [*self.tail, *tokens][-self._lookback :]
        if self.seen is not None:
            for token in tokens:
                self.seen.add(token)
        if self.thought is not None:
            self.thought.extend(tokens)
            if self.thought.is_over:
                self.thought = None

    def copy(self) -> RowRules:
        """A copy that is extended apart."""
        return replace(
            self,
            seen=None if self.seen is None else self.seen.copy(),
            thought=None if self.thought is None else self.thought.copy(),
        )

    @property
    def _lookback(self) -> int:
        return self.bad_words.lookback


def rules_of(
    params: SamplingParams,
    *,
    token_ids: Sequence[int],
    num_prompt: int,
    eos_token_ids: Collection[int],
) -> RowRules | None:
    """The rules of a row with these tokens (prompt, then output), or None if it has none."""
    if not _asks(params):
        return None
    rules = RowRules(
        allowed=_ids(params.allowed_token_ids) if params.allowed_token_ids is not None else None,
        bad_words=BadWords([word for word in params.bad_words_token_ids if word]),
        tail=[],
        min_tokens=params.min_tokens,
        end_ids=_end_ids(params, eos_token_ids),
        bias=_bias(params),
        seen=_seen(params, token_ids, num_prompt),
        thought=_thought(params, token_ids, num_prompt),
    )
    rules.tail = list(token_ids[max(num_prompt, len(token_ids) - rules._lookback) :])
    return rules if rules.applies(position=0) or rules.thought is not None else None


def _asks(params: SamplingParams) -> bool:
    """Whether there may be any: most requests have none, and learn so at once."""
    return bool(
        params.min_tokens
        or params.bad_words_token_ids
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.thinking is not None
        or _penalized(params)
    )


def _penalized(params: SamplingParams) -> bool:
    other = params.presence_penalty or params.frequency_penalty
    return bool(other) or params.repetition_penalty != 1.0


def _end_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> Tensor:
    """As vLLM has it, ``ignore_eos`` or not: load tools ask for both, so that no token is without a
    text."""
    return _ids({*eos_token_ids, *params.stop_token_ids} if params.min_tokens else ())


def _bias(params: SamplingParams) -> tuple[Tensor, Tensor] | None:
    if not params.logit_bias:
        return None
    values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    return torch.tensor(list(params.logit_bias), dtype=torch.int64), values


def _seen(params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> SeenTokens | None:
    """Presence and frequency ask for the output alone: a long prompt is then not even looked at."""
    if not _penalized(params):
        return None
    repetition = params.repetition_penalty != 1.0
    return SeenTokens(token_ids[:num_prompt] if repetition else (), token_ids[num_prompt:])


def _thought(params: SamplingParams, token_ids: Sequence[int], num_prompt: int) -> Thought | None:
    budget = params.thinking_token_budget
    if params.thinking is None or budget is None or budget < 0:
        return None
    thought = Thought(params.thinking, budget, token_ids[num_prompt:])
    return None if thought.is_over else thought


def _ids(tokens: Collection[int]) -> Tensor:
    return torch.tensor(sorted(set(tokens)), dtype=torch.int64)
