"""How a request without tokens is answered: a vector or scores, from its prompt's hidden states.

What a request leaves open is as the model's folder says it (``ModelPooling``): the engine fills it
in before any work, so that a rank sees no None.
"""

from enum import StrEnum

import msgspec

from tandem.protocol.errors import InvalidParameter
from tandem.protocol.sampling import SamplingParams

MAX_TOKEN_VALUES = 4 << 20
"""float32 values of one answer with a vector for each token, at most: 16 MiB."""


class PoolingTask(StrEnum):
    """What is wanted of a prompt; users may write its word."""

    EMBED = "embed"
    """One vector."""
    TOKEN_EMBED = "token_embed"
    """A vector for each of its tokens."""
    CLASSIFY = "classify"
    """A number for each label of the model's classification head."""


class PoolingType(StrEnum):
    """Which hidden states (behind the model's last norm) the vector is made of; users may write its
    word."""

    LAST = "last"
    """That of the prompt's last token."""
    MEAN = "mean"
    """The mean over all of the prompt's tokens. Nothing of it comes from the prefix cache, which
    keeps no hidden states."""
    CLS = "cls"
    """That of the prompt's first token, which does not come from the prefix cache either."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is wanted instead of tokens; None is the model's own way."""

    task: PoolingTask = PoolingTask.EMBED
    pooling_type: PoolingType | None = None
    """Of ``embed`` alone."""
    normalize: bool | None = None
    """Whether each vector has length one."""
    dimensions: int | None = None
    """Leading values of each vector that are kept, before its length is made one (Matryoshka)."""
    activation: bool | None = None
    """Of ``classify``: whether its numbers are probabilities; without they are the head's own."""

    @property
    def needs_all_states(self) -> bool:
        """Whether hidden states are needed that lie before the prompt's last token: then nothing of
        the prompt comes from a cache."""
        pooled_last = self.pooling_type in (None, PoolingType.LAST)
        return self.task == PoolingTask.TOKEN_EMBED or not pooled_last

    def verify(self) -> "PoolingParams":
        """These with their words as enums. Raises InvalidParameter naming the field."""
        _check_word("task", self.task, PoolingTask)
        if self.pooling_type is not None:
            _check_word("pooling_type", self.pooling_type, PoolingType)
        for name in ("normalize", "activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InvalidParameter(name, getattr(self, name), "true or false")
        dims = self.dimensions
        if dims is not None and (isinstance(dims, bool) or not isinstance(dims, int) or dims < 1):
            raise InvalidParameter("dimensions", dims, "an integer of at least 1")
        task = PoolingTask(self.task)
        for name, tasks in _OF_TASKS.items():
            if getattr(self, name) is not None and task not in tasks:
                allowed = f"only with task {' or '.join(tasks)}"
                raise InvalidParameter(name, getattr(self, name), allowed)
        kind = None if self.pooling_type is None else PoolingType(self.pooling_type)
        return msgspec.structs.replace(self, task=task, pooling_type=kind)


_OF_TASKS = {
    "pooling_type": (PoolingTask.EMBED,),
    "normalize": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    "dimensions": (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    "activation": (PoolingTask.CLASSIFY,),
}
"""Fields that mean something to some tasks only."""


def _check_word(name: str, value: object, words: type[StrEnum]) -> None:
    if value not in tuple(words):
        raise InvalidParameter(name, value, f"one of {', '.join(words)}")


class Activation(StrEnum):
    """What makes probabilities of a classification head's numbers."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's folder says of vectors and scores."""

    pooling_type: PoolingType = PoolingType.LAST
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    """Those to which vectors may be cut, where the model names them; () is any."""
    labels: tuple[str, ...] = ()
    """Of the classification head, by index; () where there is none."""
    label_tokens: tuple[int, ...] = ()
    """Of a model whose one label is a word of its own: the token that says yes, and the one that
    says no, if it has one. The label's number is the difference of their logits."""
    activation: Activation = Activation.SOFTMAX
    generates: bool = True
    """Whether the model has a head for tokens, too."""

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What can be asked for."""
        if self.labels:
            return tuple(PoolingTask)
        return (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)

    def check_task(self, params: PoolingParams) -> PoolingParams:
        """``params``, verified. Raises InvalidParameter, too, for a task that needs labels where
        there are none."""
        params = params.verify()
        if params.task not in self.tasks:
            allowed = f"{' or '.join(self.tasks)}: this model has no classification head"
            raise InvalidParameter("task", str(params.task), allowed)
        return params

    def resolve(self, params: PoolingParams, *, hidden_size: int, num_tokens: int) -> PoolingParams:
        """``params`` with all that their task needs. Raises InvalidParameter naming the field.

        Args:
            params: as a client gave them.
            hidden_size: values of a hidden state.
            num_tokens: of the prompt.
        """
        params = self.check_task(params)
        if params.task is PoolingTask.CLASSIFY:
            wanted = params.activation is not False
            return msgspec.structs.replace(
                params, pooling_type=PoolingType.LAST, activation=wanted, normalize=False
            )
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


NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)
"""The ``params`` of a request that is pooled, whatever their seed: nothing is drawn."""
