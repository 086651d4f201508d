"""Rules of one row: edits of its logits other than temperature and filters.

Most requests have none. Bad words are matched in the output only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.engine.sample.bounds import AllowedTokens
from tandem.engine.sample.seen import PromptTokens, SeenTokens
from tandem.protocol.sampling import SamplingParams, ThinkingMarks

AHEAD = 2
"""Steps that may be launched before a token of a row is known."""
OPENS_WITHIN = 16
"""Output tokens within which a thought must begin."""


class ThinkingBudget:
    """Progress of one row's thought, from its output's tokens."""

    def __init__(self, marks: ThinkingMarks, budget: int, output: Sequence[int] = ()) -> None:
        self._marks = marks
        self._budget = budget
        self._close = AllowedTokens((marks.close,))
        self._longest = max(map(len, marks.opens), default=0)
        self._num_tokens = 0
        """Tokens of the thought, or of the output before it."""
        self._has_begun = marks.has_begun
        self._tail: tuple[int, ...] = ()
        self.is_over = False
        """Whether there is no thought left to end."""
        self.extend(output)

    @property
    def forced(self) -> AllowedTokens | None:
        """Return the token that must end the thought now, or None."""
        spent = self._has_begun and self._num_tokens >= self._budget
        return self._close if spent and not self.is_over else None

    @property
    def may_end_unseen(self) -> bool:
        """Return whether the thought may have to end before tokens in flight are known."""
        return not self.is_over and self._num_tokens * self._has_begun + AHEAD >= self._budget

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.is_over:
                return
            self._num_tokens += 1
            if self._has_begun:
                self.is_over = token == self._marks.close
            else:
                self._look_for_begin(token)

    def copy(self) -> ThinkingBudget:
        other = ThinkingBudget(self._marks, self._budget)
        other._num_tokens, other._has_begun = self._num_tokens, self._has_begun
        other._tail, other.is_over = self._tail, self.is_over
        return other

    def _look_for_begin(self, token: int) -> None:
        self._tail = (*self._tail, token)[-self._longest :]
        if any(self._tail[-len(each) :] == tuple(each) for each in self._marks.opens):
            self._has_begun, self._num_tokens = True, 0
        else:
            self.is_over = self._num_tokens >= OPENS_WITHIN


class BadWords:
    """Sequences whose last token is not drawn after the others; falsy when empty. A step costs one
    look-up per length."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.lookback = 0
        """Output tokens that must be known: one less than the longest word has."""
        self._always = torch.tensor(
            sorted({word[0] for word in words if len(word) == 1}), dtype=torch.int64
        )
        self._after: dict[int, dict[tuple[int, ...], list[int]]] = {}
        """Last tokens by the number of tokens before the last, then by these."""
        for word in words:
            if len(word) > 1:
                ends = self._after.setdefault(len(word) - 1, {})
                ends.setdefault(word[:-1], []).append(word[-1])
                self.lookback = max(self.lookback, len(word) - 1)

    def __bool__(self) -> bool:
        return bool(self._after) or self._always.numel() > 0

    def forbidden(self, tail: Sequence[int]) -> Tensor:
        """Return the tokens (int64) that would complete a word after the output's last tokens."""
        ends = [
            end
            for length, words in self._after.items()
            for end in words.get(tuple(tail[-length:]), ())
        ]
        if not ends:
            return self._always
        return torch.cat([self._always, torch.tensor(ends, dtype=torch.int64)])


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Rules that all choices of a request share, made once."""

    params: SamplingParams
    eos_token_ids: Collection[int]
    allowed: AllowedTokens | None
    """Only tokens that may be drawn; None allows all."""
    bad_words: BadWords
    end_ids: Tensor
    """Tokens (int64) that may not be drawn before ``min_tokens``."""
    bias: tuple[Tensor, Tensor] | None
    """int64 tokens and float32 numbers to add to their logits."""
    prompt: PromptTokens | None
    """Prompt for the repetition penalty; None if it is off."""

    @classmethod
    def of(
        cls, params: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]
    ) -> RequestRules:
        allowed = params.allowed_token_ids
        return cls(
            params=params,
            eos_token_ids=eos_token_ids,
            allowed=None if allowed is None else AllowedTokens(allowed),
            bad_words=BadWords([word for word in params.bad_words_token_ids if word]),
            end_ids=_end_ids(params, eos_token_ids),
            bias=_bias(params),
            prompt=PromptTokens(prompt) if params.repetition_penalty != 1.0 else None,
        )

    def are_of(
        self, params: SamplingParams, prompt: Sequence[int], eos_token_ids: Collection[int]
    ) -> bool:
        if params is not self.params and params != self.params:
            return False  # avoids the comparison of long lists
        if eos_token_ids != self.eos_token_ids:
            return False
        return self.prompt is None or self.prompt.prompt == prompt

    def of_row(self, output: Sequence[int]) -> RowRules | None:
        """Return the rules of a row with this output so far, or None if it has none."""
        lookback = self.bad_words.lookback
        rules = RowRules(
            request=self,
            tail=list(output[max(0, len(output) - lookback) :]),
            seen=SeenTokens(self.prompt, output) if _penalized(self.params) else None,
            thought=_thought(self.params, output),
        )
        return rules if rules.applies(position=0) or rules.thought is not None else None


@dataclass(slots=True)
class RowRules:
    """Rules of one row, with the state of its tokens that they need."""

    request: RequestRules
    tail: list[int]
    """Last output tokens, as many as the longest bad word needs."""
    seen: SeenTokens | None
    """Counts for the penalties; None if they are off."""
    thought: ThinkingBudget | None
    """Progress of the thought while it may have to be ended."""

    @property
    def looks_back(self) -> bool:
        return self.seen is not None or self._lookback > 0 or self.thought is not None

    @property
    def needs_tokens(self) -> bool:
        """Return whether the next draw needs every token before it on the host."""
        unseen = self.thought is not None and self.thought.may_end_unseen
        return self.seen is not None or self._lookback > 0 or unseen

    @property
    def allowed_now(self) -> AllowedTokens | None:
        """Return the only tokens that this draw may be; None allows all."""
        forced = None if self.thought is None else self.thought.forced
        return self.request.allowed if forced is None else forced

    @property
    def bias(self) -> tuple[Tensor, Tensor] | None:
        """Return int64 tokens and the float32 numbers to add to their logits."""
        return self.request.bias

    @property
    def end_ids(self) -> Tensor:
        """Return the tokens (int64) that may not be drawn if ``holds_back_end``."""
        return self.request.end_ids

    def applies(self, position: int) -> bool:
        lasting = self.request.bad_words or self.allowed_now is not None or self.bias is not None
        return bool(lasting) or self.seen is not None or self.holds_back_end(position)

    def holds_back_end(self, position: int) -> bool:
        return position < self.request.params.min_tokens and self.end_ids.numel() > 0

    def forbidden_words(self) -> Tensor:
        """Return the tokens (int64) that would complete a bad word now."""
        return self.request.bad_words.forbidden(self.tail)

    def extend(self, tokens: Sequence[int]) -> None:
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
        return replace(
            self,
            seen=None if self.seen is None else self.seen.copy(),
            thought=None if self.thought is None else self.thought.copy(),
        )

    @property
    def _lookback(self) -> int:
        return self.request.bad_words.lookback


def asks(params: SamplingParams) -> bool:
    """Return whether there may be any rules, cheaply."""
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
    ends = {*eos_token_ids, *params.stop_token_ids} if params.min_tokens else ()
    return torch.tensor(sorted(ends), dtype=torch.int64)


def _bias(params: SamplingParams) -> tuple[Tensor, Tensor] | None:
    if not params.logit_bias:
        return None
    values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
    return torch.tensor(list(params.logit_bias), dtype=torch.int64), values


def _thought(params: SamplingParams, output: Sequence[int]) -> ThinkingBudget | None:
    budget = params.thinking_token_budget
    if params.thinking is None or budget is None or budget < 0:
        return None
    thought = ThinkingBudget(params.thinking, budget, output)
    return None if thought.is_over else thought
