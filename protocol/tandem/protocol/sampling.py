"""Sampling parameters of one request, in vLLM's names, and their allowed values.

A request that samples has a seed when it reaches a worker. The router draws it if the client gave
none, so that attempts sample the same tokens.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.structured import StructuredOutputsParams

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1_024
MAX_STOP_TOKEN_IDS = 1_024
MAX_LOGIT_BIAS = 4_096
MAX_BAD_WORDS = 4_096
MAX_BAD_WORD_CHARS = 256
MAX_BAD_WORD_IDS = 64
"""Maximum ids of a bad word."""
DEFAULT_MAX_LOGPROBS = 20
ALL_LOGPROBS = -1
"""Value of ``logprobs`` for the whole vocabulary."""
PENALTY_RANGE = 1e-20, 1e20
"""Bounds of ``repetition_penalty``: float32 logits stay finite."""
SEED_BITS = 63
NO_SEED = -1
"""Value of ``seed`` for none, as in vLLM."""

MAX_EXTRA_ARGS = 64
MAX_EXTRA_ARG_CHARS = 128
MAX_EXTRA_VALUES = 1_024
MAX_EXTRA_TEXT = 4_096
ExtraArg = str | int | float | list[str | int | float]

_MOST = {
    "stop_token_ids": MAX_STOP_TOKEN_IDS,
    "logit_bias": MAX_LOGIT_BIAS,
    "bad_words": MAX_BAD_WORDS,
}


class OutputKind(StrEnum):
    """Content of the outputs that ``LLM`` and ``AsyncLLM`` return."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class ThinkingMarks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Token ids that mark a model's reasoning."""

    opens: tuple[tuple[int, ...], ...] = ()
    close: int
    has_begun: bool = False
    """Whether the prompt has already opened it."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of sampling and stopping. Construct, then call ``verify()``."""

    n: int = 1
    """Choices drawn from one prompt, 1 to 128."""
    temperature: float = 1.0
    """0 is greedy (the first of equal maxima); at most 2."""
    top_p: float = 1.0
    """Smallest set of tokens whose probability reaches this, in (0, 1]."""
    top_k: int = 0
    """Only the k best tokens; 0 or -1 is off."""
    min_p: float = 0.0
    """Tokens under this share of the best token's probability are dropped, in [0, 1]."""
    seed: int | None = None
    """Draws depend on (seed, choice, output position, purpose) and nothing else; -1 is none."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already emitted, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per earlier emission, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; found by text/, never by a worker."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids."""
    max_tokens: int | None = None
    """Maximum number of tokens to emit; None is the rest of the context."""
    min_tokens: int = 0
    """End-of-sequence and stop ids cannot be drawn before this many tokens."""
    logprobs: int | None = None
    """Log-probabilities of the drawn token and this many best ones; -1 is all, None is off."""
    prompt_logprobs: int | None = None
    """Alternatives to return for each token of the prompt; None is none, -1 all."""
    logit_bias: dict[int, float] | None = None
    """Numbers in [-100, 100] by token id, added to its logit."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens may be sampled."""
    bad_words: tuple[str, ...] = ()
    """Texts never to emit; workers receive ``bad_words_token_ids``."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last id is not sampled after the preceding ones; filled by text/."""
    structured_outputs: StructuredOutputsParams | None = None
    """Form that the answer must match."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens of reasoning before the answer; -1 is any number."""
    thinking: ThinkingMarks | None = None
    """Filled by text/ if there is a budget and reasoning for it to bound."""
    extra_args: dict[str, ExtraArg] | None = None
    """Arguments of the workers' logits processors, by name: ``vllm_xargs`` of HTTP."""
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_seed(self) -> bool:
        return self.seed is not None and self.seed != NO_SEED

    def verify(self) -> "SamplingParams":
        """Return self, or raise InvalidParameter for the first value that is not allowed."""
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, 2.0)
        if not (_finite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise InvalidParameter("top_p", self.top_p, "a number above 0 and at most 1")
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**SEED_BITS), 2**SEED_BITS - 1)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, *PENALTY_RANGE)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}"
            )
        if self.thinking_token_budget is not None:
            _integer("thinking_token_budget", self.thinking_token_budget, -1, 2**31 - 1)
        if self.extra_args is not None:
            _verify_extra(self.extra_args)
        self._verify_lists()
        if self.structured_outputs is not None:
            self.structured_outputs.verify()
        return self

    def _verify_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParameter("stop", self.stop, f"at most {MAX_STOP_STRINGS} strings")
        for name, most in _MOST.items():
            if len(getattr(self, name) or ()) > most:
                raise InvalidParameter(name, getattr(self, name), f"at most {most} entries")
        for name, texts, most in (
            ("stop", self.stop, MAX_STOP_CHARS),
            ("bad_words", self.bad_words, MAX_BAD_WORD_CHARS),
        ):
            if texts:
                _texts(name, texts, most)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidParameter("allowed_token_ids", [], "at least one token id")
        for param, count in (
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            if count is not None and count != ALL_LOGPROBS:
                _integer(param, count, 0, 2**31 - 1)
        if self.logit_bias:
            _biases(self.logit_bias)

    def verify_vocabulary(
        self, vocab_size: int, max_logprobs: int = DEFAULT_MAX_LOGPROBS
    ) -> "SamplingParams":
        """Return self, or raise InvalidParameter for ids or counts beyond the model's."""
        _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        _ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        _ids("logit_bias", tuple(self.logit_bias or {}), vocab_size)
        if self.thinking is not None:
            marks = (self.thinking.close, *(each for ids in self.thinking.opens for each in ids))
            _ids("thinking_token_budget", marks, vocab_size)
        if len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:  # two forms of each
            raise InvalidParameter("bad_words", self.bad_words, f"at most {MAX_BAD_WORDS} words")
        for words in self.bad_words_token_ids:
            if len(words) > MAX_BAD_WORD_IDS:
                raise InvalidParameter(
                    "bad_words", words, f"words of at most {MAX_BAD_WORD_IDS} tokens"
                )
            _ids("bad_words", words, vocab_size)
        if self.allowed_token_ids and len(self.allowed_token_ids) > vocab_size:
            raise InvalidParameter(
                "allowed_token_ids", self.allowed_token_ids, f"at most {vocab_size} ids"
            )
        for param, count in (
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            most = vocab_size if count == ALL_LOGPROBS else count
            if most is not None and most > max_logprobs:
                raise InvalidParameter(
                    param,
                    count,
                    f"0 to {max_logprobs} on this server; -1, for all {vocab_size} of the "
                    "vocabulary, needs --max-logprobs -1",
                )
        return self

    def with_all_logprobs(self, vocab_size: int) -> "SamplingParams":
        """Return parameters with the vocabulary size instead of -1."""
        if ALL_LOGPROBS not in (self.logprobs, self.prompt_logprobs):
            return self
        counts = {"logprobs": self.logprobs, "prompt_logprobs": self.prompt_logprobs}
        wanted = {name: vocab_size for name, count in counts.items() if count == ALL_LOGPROBS}
        return msgspec.structs.replace(self, **wanted)


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    """Return parameters with ``seed`` set if the client gave none."""
    return params if params.has_seed else msgspec.structs.replace(params, seed=seed)


def from_mapping(fields: Mapping[str, object]) -> SamplingParams:
    """Return verified parameters from plain values. Raises InvalidParameter."""
    known = SamplingParams.__struct_fields__
    for name in fields:
        if name not in known:
            raise InvalidParameter(name, fields[name], f"one of {', '.join(sorted(known))}")
    try:
        return msgspec.convert(dict(fields), SamplingParams, strict=False).verify()
    except msgspec.ValidationError as error:
        raise InvalidParameter("sampling parameters", dict(fields), str(error)) from error


def _finite(value: float) -> bool:
    return not isinstance(value, bool) and math.isfinite(value)


def _number(param: str, value: float, low: float, high: float) -> None:
    if not (_finite(value) and low <= value <= high):
        raise InvalidParameter(param, value, f"a number from {low:g} to {high:g}")


def _integer(param: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(param, value, f"an integer from {low} to {high}")


def _biases(biases: Mapping[int, float]) -> None:
    wrong = {
        token: bias
        for token, bias in biases.items()
        if not (_finite(bias) and -100.0 <= bias <= 100.0)
    }
    if len(wrong) == 1:
        ((token, bias),) = wrong.items()
        raise InvalidParameter(f"logit_bias.{token}", bias, "a number from -100 to 100")
    if wrong:
        raise InvalidParameter("logit_bias", wrong, "numbers from -100 to 100")


def _verify_extra(given: Mapping[str, ExtraArg]) -> None:
    if len(given) > MAX_EXTRA_ARGS or any(len(name) > MAX_EXTRA_ARG_CHARS for name in given):
        allowed = f"at most {MAX_EXTRA_ARGS} names of at most {MAX_EXTRA_ARG_CHARS} characters"
        raise InvalidParameter("vllm_xargs", list(given), allowed)
    for name, value in given.items():
        values = value if isinstance(value, list) else [value]
        if len(values) > MAX_EXTRA_VALUES:
            raise InvalidParameter(
                f"vllm_xargs.{name}", value, f"at most {MAX_EXTRA_VALUES} values"
            )
        for each in values:
            if isinstance(each, str):
                fits = len(each) <= MAX_EXTRA_TEXT
            elif isinstance(each, int):
                fits = -(2**63) <= each < 2**64
            else:
                fits = isinstance(each, float) and math.isfinite(each)
            if not fits:
                allowed = (
                    f"texts of at most {MAX_EXTRA_TEXT} characters, finite numbers, and integers "
                    "of 64 bits"
                )
                raise InvalidParameter(f"vllm_xargs.{name}", each, allowed)


def _texts(param: str, texts: Sequence[str], most: int) -> None:
    if "" in texts:
        raise InvalidParameter(param, "", "strings of at least one character")
    for each in texts:
        if len(each) > most:
            raise InvalidParameter(param, each, f"strings of at most {most} characters")


def _ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    value = wrong if len(wrong) > 1 else wrong[0]
    raise InvalidParameter(param, value, f"token ids from 0 to {vocab_size - 1}")
