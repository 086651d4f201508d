"""Pooling: answers with a vector or scores, made of a prompt's hidden states."""

from enum import StrEnum
from typing import TypeVar

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

MAX_PLACE = 2**31 - 1
"""Bound of a vector's length or a prompt's tokens."""
MAX_TOKEN_VALUES = 4 << 20
"""Maximum float32 values of one answer with a vector for each token."""


class PoolingTask(StrEnum):
    """Task of a pooled request; users may give its value as a string."""

    EMBED = "embed"
    """One vector."""
    TOKEN_EMBED = "token_embed"
    """A vector for each of its tokens."""
    CLASSIFY = "classify"
    """A number for each label of the model's classification head."""


_TASKS = tuple(PoolingTask)


class PoolingType(StrEnum):
    """Hidden states (after the model's last norm) that the vector is made of. Users may give its
    value as a string."""

    LAST = "last"
    """The last token's hidden state."""
    MEAN = "mean"
    """The mean over all tokens. Uses nothing of the prefix cache, which has no hidden states."""
    CLS = "cls"
    """The first token's hidden state, which does not come from the prefix cache either."""


class LateInteractionMode(StrEnum):
    """Use of the vectors of a prompt's tokens, instead of returning them."""

    CACHE_QUERY = "cache_query"
    """The worker keeps them. The answer is their number."""
    SCORE_DOC = "score_doc"
    """The answer is their score against a kept query, NaN if it is not kept."""


MAX_QUERY_KEY = 64
MAX_QUERY_USES = 1 << 20


class LateInteractionParams(msgspec.Struct, frozen=True, kw_only=True):
    """Scoring of documents by their tokens, at the worker that keeps the query."""

    mode: LateInteractionMode
    query_key: str
    """Name of the query; requests with one key go to one worker."""
    query_uses: int = 1
    """Number of documents for which a query is kept."""

    def verify(self) -> None:
        _word("late_interaction.mode", self.mode, LateInteractionMode)
        key = self.query_key
        if not isinstance(key, str) or not 0 < len(key) <= MAX_QUERY_KEY:
            allowed = f"a text of 1 to {MAX_QUERY_KEY} characters"
            raise InvalidParameter("late_interaction.query_key", key, allowed)
        uses = self.query_uses
        if isinstance(uses, bool) or not isinstance(uses, int) or not 0 < uses <= MAX_QUERY_USES:
            allowed = f"an integer from 1 to {MAX_QUERY_USES}"
            raise InvalidParameter("late_interaction.query_uses", uses, allowed)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a pooled request. None selects the model's default."""

    task: PoolingTask = PoolingTask.EMBED
    pooling_type: PoolingType | None = None
    """Allowed with ``embed`` only."""
    normalize: bool | None = None
    """True scales each vector to length one."""
    dimensions: int | None = None
    """Leading values of each vector that are kept, before it is normalized (Matryoshka)."""
    activation: bool | None = None
    """Allowed with ``classify`` only. True returns probabilities, False the head's numbers."""
    second_text_at: int | None = None
    """Position of the second text's first token, for a pair of texts in one prompt. Its tokens have
    another type. Allowed for models with token types (BERT) only."""
    late_interaction: LateInteractionParams | None = None
    """Allowed with ``token_embed`` only: the vectors are kept or scored, and not returned."""

    @property
    def needs_all_states(self) -> bool:
        """Return whether hidden states before the prompt's last token are needed."""
        pooled_last = self.pooling_type in (None, PoolingType.LAST)
        return self.task == PoolingTask.TOKEN_EMBED or not pooled_last

    def verify(self) -> "PoolingParams":
        """Return a ``PoolingParams`` with enum values. Raises InvalidParameter naming the field."""
        task, kind = _word("task", self.task, PoolingTask), self.pooling_type
        if kind is not None:
            kind = _word("pooling_type", kind, PoolingType)
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidParameter(name, getattr(self, name), "true or false")
        for name in ("dimensions", "second_text_at"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and 1 <= value <= MAX_PLACE):
                raise InvalidParameter(name, value, f"an integer from 1 to {MAX_PLACE}")
        if self.late_interaction is not None:
            self.late_interaction.verify()
        for name, tasks in _OF_TASKS.items():
            if getattr(self, name) is not None and task not in tasks:
                allowed = f"only with task {' or '.join(tasks)}"
                raise InvalidParameter(name, getattr(self, name), allowed)
        if type(self) is PoolingParams and task is self.task and kind is self.pooling_type:
            return self
        # Subclasses verify what they add.
        fields = {name: getattr(self, name) for name in PoolingParams.__struct_fields__}
        return PoolingParams(**{**fields, "task": task, "pooling_type": kind})


_OF_TASKS = {
    "pooling_type": (PoolingTask.EMBED,),
    "normalize": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    "dimensions": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    "activation": (PoolingTask.CLASSIFY,),
    "late_interaction": (PoolingTask.TOKEN_EMBED,),
}
"""Tasks that allow a field."""


_Word = TypeVar("_Word", bound=StrEnum)


def _word(name: str, value: object, words: type[_Word]) -> _Word:
    if isinstance(value, words):
        return value
    if not isinstance(value, str) or value not in tuple(words):
        raise InvalidParameter(name, value, f"one of {', '.join(words)}")
    return words(value)


class Activation(StrEnum):
    """Function that converts a classification head's numbers to probabilities."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pooling settings from a model's folder."""

    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    """Allowed lengths of cut vectors; () allows any."""
    labels: tuple[str, ...] = ()
    """Labels of the classification head, by index; () without a head."""
    label_tokens: tuple[int, ...] = ()
    """Tokens for yes and possibly no, if the one label is a token.

    Its number is the difference of their logits.
    """
    activation: Activation = Activation.SOFTMAX
    generates: bool = True
    """True if the model can also generate tokens."""
    classified: PoolingType = PoolingType.LAST
    """Hidden state that the classification head reads."""
    has_token_types: bool = False
    """Whether the second text of a pair has another token type."""
    token_values: int | None = None
    """Length of the token vectors of a late-interaction model, which returns no other vectors."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        if self.token_values is not None:
            return (PoolingTask.TOKEN_EMBED,)
        if self.labels:
            return _TASKS
        return (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)

    def check_task(self, params: PoolingParams) -> PoolingParams:
        """Return verified ``params``. Raises InvalidParameter for an unsupported task."""
        params = params.verify()
        if params.task not in self.tasks:
            why = "this model has no classification head"
            if self.token_values is not None:
                why = "this model gives a vector for each token, for late interaction"
            allowed = f"{' or '.join(self.tasks)}: {why}"
            raise InvalidParameter("task", str(params.task), allowed)
        return params

    def resolve(self, params: PoolingParams, *, hidden_size: int, num_tokens: int) -> PoolingParams:
        """Return ``params`` with all fields that their task needs. Raises InvalidParameter.

        ``hidden_size`` is in values; ``num_tokens`` are the prompt's.
        """
        params = self.check_task(params)
        self._check_pair(params.second_text_at, num_tokens)
        if params.task is PoolingTask.CLASSIFY:
            wanted = params.activation is not False
            return msgspec.structs.replace(
                params, pooling_type=self.classified, activation=wanted, normalize=False
            )
        if self.token_values is not None:
            hidden_size = self.token_values
        dims = params.dimensions
        if dims is not None and (dims > hidden_size or dims not in (self.dimensions or (dims,))):
            named = ", ".join(map(str, self.dimensions))
            allowed = f"one of {named}" if named else f"an integer from 1 to {hidden_size}"
            raise InvalidParameter("dimensions", dims, allowed)
        dims = dims or hidden_size
        if params.task is PoolingTask.TOKEN_EMBED and num_tokens * dims > MAX_TOKEN_VALUES:
            raise InvalidParameter(
                "prompt_token_ids",
                f"{num_tokens} tokens",
                f"at most {MAX_TOKEN_VALUES // dims} for vectors of {dims} values each",
            )
        kind = params.pooling_type or self.pooling_type
        if params.task is PoolingTask.TOKEN_EMBED:
            kind = PoolingType.LAST
        given = params.normalize
        return msgspec.structs.replace(
            params,
            pooling_type=kind,
            normalize=self.normalize if given is None else given,
            dimensions=dims,
        )

    def _check_pair(self, at: int | None, num_tokens: int) -> None:
        if at is None:
            return
        if not self.has_token_types:
            raise InvalidParameter("second_text_at", at, "none: this model has no token types")
        if at >= num_tokens:
            allowed = f"a position within the prompt's {num_tokens} tokens"
            raise InvalidParameter("second_text_at", at, allowed)


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""Sampling parameters of a pooled request."""
