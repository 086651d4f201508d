"""Conversion of the engine's tokens to text, log-probabilities and finish reasons.

It finds stop strings, which workers do not know. After a choice has ended, its later tokens are
dropped and its worker can be notified (``ended``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from tandem.protocol.outputs import EngineCoreOutput, FinishReason, TokenLogprobs
from tandem.protocol.requests import EngineCoreRequest
from tandem.protocol.sampling import OutputKind
from tandem.text.input_processor import ProcessedInput
from tandem.text.pieces import StopMatcher
from tandem.text.tokenizer import Tokenizer


class AnswerOffsets:
    """Offsets of one choice's tokens, in characters from ``start`` on."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        context: Sequence[int],
        start: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=skip_special_tokens, context=context
        )
        self._end = start

    def place(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._end)
            self._end += len(self._detokenizer.feed(token_id))
        return offsets


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """Prompt as it is shown before its answer; ``offsets`` has one entry per token."""

    text: str
    offsets: list[int]


def echoed_prompt(tokenizer: Tokenizer, text: str | None, token_ids: Sequence[int]) -> EchoedPrompt:
    """Return the client's text with offsets, decoded from the tokens if it is not known or
    truncated.
    """
    pieces = _spelled(tokenizer, token_ids)
    if text is not None:
        offsets = _aligned(tokenizer, text, token_ids, pieces)
        if offsets is None:
            offsets = tokenizer.offsets(text, token_ids)
        if offsets is not None:
            return EchoedPrompt(text, offsets)
    return EchoedPrompt("".join(pieces), _begins(pieces)[: len(token_ids)])


def _spelled(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, special ones written out, and the rest as one more piece."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    return [*map(detokenizer.feed, token_ids), detokenizer.end()]


def _begins(pieces: Sequence[str]) -> list[int]:
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += len(piece)
    return offsets


def _aligned(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], pieces: Sequence[str]
) -> list[int] | None:
    """Return offsets in ``text``. None if it differs from the tokens' text, except special
    tokens."""
    offsets: list[int] = []
    at = 0
    for token_id, piece in zip(token_ids, pieces, strict=False):
        offsets.append(at)
        if text.startswith(piece, at):
            at += len(piece)
        elif token_id not in tokenizer.special_ids:
            return None
    return offsets if text[at:] == pieces[-1] else None


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    """Token at one position."""

    token_id: int
    logprob: float
    """Natural logarithm."""
    rank: int
    """Rank in the vocabulary, from 1."""
    decoded_token: str
    bytes: bytes
    """Bytes of the token; joined over positions they give the text."""


class PositionLogprobs(Mapping[int, Logprob]):
    """Log-probabilities of one position, by token id."""

    __slots__ = ("sampled", "top")

    def __init__(self, sampled: Logprob, top: tuple[Logprob, ...]) -> None:
        self.sampled = sampled
        self.top = top
        """Requested best tokens, best first."""

    def __getitem__(self, token_id: int) -> Logprob:
        for each in chain((self.sampled,), self.top):
            if each.token_id == token_id:
                return each
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield from dict.fromkeys((self.sampled.token_id, *(each.token_id for each in self.top)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"PositionLogprobs(sampled={self.sampled!r}, top={self.top!r})"


def with_texts(tokenizer: Tokenizer, position: TokenLogprobs) -> PositionLogprobs:
    """Return ``position`` with the text of every token."""

    def of(token_id: int, logprob: float, rank: int) -> Logprob:
        data = tokenizer.token_bytes(token_id)
        return Logprob(
            token_id=token_id,
            logprob=logprob,
            rank=rank,
            decoded_token=data.decode(errors="replace"),
            bytes=data,
        )

    best = zip(position.top_ids, position.top_logprobs, strict=True)
    return PositionLogprobs(
        of(position.token_id, position.logprob, position.rank),
        tuple(of(token_id, value, rank) for rank, (token_id, value) in enumerate(best, start=1)),
    )


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, in vLLM's names: new content (DELTA) or all of it (other kinds)."""

    index: int
    text: str
    token_ids: Sequence[int]
    """All tokens, including those of the stop string or the end."""
    cumulative_logprob: float | None = None
    """Sum over the choice; None unless logprobs were requested."""
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Stop id or stop string that ended it; None for end-of-sequence."""

    def finished(self) -> bool:
        return self.finish_reason is not None


class OutputProcessor:
    """Factory of request states."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def begin(self, processed: ProcessedInput) -> RequestState:
        return RequestState(self._tokenizer, processed.request, processed.seen_special_ids)


class RequestState:
    """All choices of one request."""

    __slots__ = (
        "_computing",
        "_final_only",
        "_running",
        "_tokenizer",
        "choices",
        "ended",
        "num_cached_tokens",
        "num_generated_tokens",
        "num_prompt_tokens",
        "prompt_logprobs",
    )

    def __init__(
        self, tokenizer: Tokenizer, request: EngineCoreRequest, seen: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._final_only = request.params.output_kind is OutputKind.FINAL_ONLY
        self.choices = [
            ChoiceState(tokenizer, request, index, seen) for index in range(request.params.n)
        ]
        self._running = self._computing = len(self.choices)
        self.ended: list[int] = []
        """Choices that ended while the engine continues them."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_generated_tokens = 0
        """Tokens of all choices so far."""
        self.num_cached_tokens: int | None = None
        """Prompt tokens that were not computed; known with the first token."""
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None
        """One per prompt token, None for the first; known with the first token."""

    @property
    def finished(self) -> bool:
        return self._running == 0

    @property
    def must_abort(self) -> bool:
        """Return whether the engine computes tokens that would all be dropped."""
        return self._running == 0 and self._computing > 0

    def feed(self, output: EngineCoreOutput) -> list[CompletionOutput]:
        """Return the outputs for ``output``: one choice, all at the end (FINAL_ONLY), or none."""
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [
                None if each is None else with_texts(self._tokenizer, each)
                for each in output.prompt_logprobs
            ]
        if output.finish is not None:
            self._computing -= 1
        choice = self.choices[output.choice]
        if choice.finish_reason is not None or not (output.token_ids or output.finish):
            return []
        before = choice.num_tokens
        shown = choice.feed(output)
        self.num_generated_tokens += choice.num_tokens - before
        if choice.finish_reason is not None:
            self._running -= 1
            if output.finish is None:
                self.ended.append(output.choice)
        if shown is not None:
            return [shown]
        return [] if self._running else [each.snapshot() for each in self.choices]

    def cut(self) -> list[CompletionOutput]:
        """End every running choice, and return the outputs for that."""
        if not self.num_generated_tokens:
            return []
        running = [each for each in self.choices if each.finish_reason is None]
        ended = [each.cut() for each in running]
        self._running = 0
        if self._final_only:
            return [each.snapshot() for each in self.choices]
        return [each for each in ended if each is not None]


def context_of(tokenizer: Tokenizer, request: EngineCoreRequest) -> Sequence[int]:
    """Return the tokens before the answer's text; a letter for embeddings."""
    embedded = request.prompt_embeds is not None
    return tokenizer.letter if embedded else request.prompt_token_ids


class ChoiceState:
    """One choice: detokenizer, stop strings, counts, and (unless DELTA) all content."""

    __slots__ = (
        "_delta",
        "_detokenizer",
        "_eos",
        "_final_only",
        "_hides_stop_token",
        "_logprobs",
        "_may_complete",
        "_min_tokens",
        "_stops",
        "_texts",
        "_token_ids",
        "_tokenizer",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "num_tokens",
        "stop_reason",
    )

    def __init__(
        self, tokenizer: Tokenizer, request: EngineCoreRequest, index: int, seen: frozenset[int]
    ) -> None:
        params = request.params
        self._tokenizer = tokenizer
        self._detokenizer = (
            tokenizer.detokenizer(
                skip_special_tokens=params.skip_special_tokens,
                context=context_of(tokenizer, request),
                seen=seen,
            )
            if params.detokenize
            else None
        )
        self._stops = (
            StopMatcher(params.stop, include=params.include_stop_str_in_output)
            if params.stop
            else None
        )
        self._min_tokens = params.min_tokens
        self._hides_stop_token = not params.include_stop_str_in_output
        self._may_complete = params.structured_outputs is not None
        self._eos = request.eos_token_ids
        self._delta = params.output_kind is OutputKind.DELTA
        self._final_only = params.output_kind is OutputKind.FINAL_ONLY
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.index = index
        self.num_tokens = 0
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def feed(self, output: EngineCoreOutput) -> CompletionOutput | None:
        """Process tokens. Return the delta, None (FINAL_ONLY), or a snapshot."""
        assert output.position == self.num_tokens, "positions come in order, without gaps"
        token_ids, text = self._read(output)
        self.num_tokens += len(token_ids)
        logprobs = self._with_texts(output, len(token_ids))
        if self._delta:
            return self._show(text, token_ids, logprobs)
        self._texts.append(text)
        self._token_ids += token_ids
        if self._logprobs is not None:
            self._logprobs += logprobs or ()
        return None if self._final_only else self.snapshot()

    def cut(self) -> CompletionOutput | None:
        """End here with reason ``abort``. Return as ``feed``."""
        text = "" if self._detokenizer is None else self._flush()
        self._end(FinishReason.ABORT, None)
        if self._delta:
            return self._show(text, [], None if self._logprobs is None else [])
        self._texts.append(text)
        return None if self._final_only else self.snapshot()

    def snapshot(self) -> CompletionOutput:
        """Return all content so far."""
        self._texts = ["".join(self._texts)]
        logprobs = None if self._logprobs is None else list(self._logprobs)
        return self._show(self._texts[0], list(self._token_ids), logprobs)

    def _show(
        self,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[PositionLogprobs] | None,
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _read(self, output: EngineCoreOutput) -> tuple[Sequence[int], str]:
        """Return the tokens that count and their text. Sets the finish reason at the end."""
        token_ids: Sequence[int] = output.token_ids
        text = ""
        if self._detokenizer is not None:
            hides = output.finish is FinishReason.STOP and self._hides_stop_token
            shown = token_ids[:-1] if hides and self._ended_by_token(output) else token_ids
            text, used = self._decode(shown)
            if self._found is not None:
                self._end(FinishReason.STOP, self._found)
                return token_ids[:used], text
            if output.finish is not None:
                text += self._flush()
            if self._found is not None:
                self._end(FinishReason.STOP, self._found)
                return token_ids, text
        if output.finish is not None:
            self._end(output.finish, output.stop_token)
        return token_ids, text

    def _ended_by_token(self, output: EngineCoreOutput) -> bool:
        """Return whether the last token only ends the output. If a grammar is complete, it may
        belong to the text."""
        if not self._may_complete or output.stop_token is not None:
            return True
        return output.token_ids[-1:] != () and output.token_ids[-1] in self._eos

    def _decode(self, token_ids: Sequence[int]) -> tuple[str, int]:
        """Return the text of ``token_ids`` up to a stop string, and the number of tokens used."""
        assert self._detokenizer is not None
        feed, stops = self._detokenizer.feed, self._stops
        if stops is None:
            if len(token_ids) == 1:
                return feed(token_ids[0]), 1
            return "".join(map(feed, token_ids)), len(token_ids)
        text = ""
        for used, token_id in enumerate(token_ids, start=1):
            armed = self.num_tokens + used >= self._min_tokens
            text += stops.feed(feed(token_id), armed=armed)
            if stops.found is not None:
                return text, used
        return text, len(token_ids)

    def _flush(self) -> str:
        assert self._detokenizer is not None
        rest = self._detokenizer.end()
        if self._stops is None:
            return rest
        text = self._stops.feed(rest)
        return text if self._found is not None else text + self._stops.end()

    @property
    def _found(self) -> str | None:
        return None if self._stops is None else self._stops.found

    def _end(self, reason: FinishReason, stop: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop

    def _with_texts(self, output: EngineCoreOutput, count: int) -> list[PositionLogprobs] | None:
        if self.cumulative_logprob is None or output.logprobs is None:
            return None
        positions = output.logprobs[:count]
        self.cumulative_logprob += sum(each.logprob for each in positions)
        return [with_texts(self._tokenizer, each) for each in positions]
