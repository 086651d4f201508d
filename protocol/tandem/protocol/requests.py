"""Request of a router to a worker to start one attempt."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.hashing import PromptContent
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import Watch


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidParameter for the first id that is not from 0 to ``vocab_size`` - 1."""
    try:
        msgspec.convert(ids, _list_of(vocab_size))
    except msgspec.ValidationError:
        for each in ids:
            if not 0 <= each < vocab_size:
                allowed = f"token ids from 0 to {vocab_size - 1}"
                raise InvalidParameter(param, each, allowed) from None


@lru_cache(maxsize=16)
def _list_of(vocab_size: int) -> Any:
    return list[Annotated[int, Meta(ge=0, lt=vocab_size)]]


class Produce(msgspec.Struct, frozen=True, tag="produce"):
    """Prefill, hand the KV over, emit token 1 and end."""

    consumer: Incarnation
    """The only decode worker that may fetch the KV."""


class Consume(msgspec.Struct, frozen=True, tag="consume"):
    """Receive the prompt's KV and token 1 from a prefill worker and continue."""

    producer: Incarnation
    """The prefill worker to fetch from."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """Fetch blocks of the prompt from a peer, or compute them if that takes longer."""

    holder: Incarnation
    """Worker of either role."""
    num_tokens: int
    """Tokens of the prompt's start that the peer has cached."""
    budget_ms: int
    """Expected time to compute them, in milliseconds; a fetch may not take longer."""
    have: int = 0
    """Tokens of the prompt's start that this worker has cached."""


_CONTENT = ("prompt_embeds",)


class ModelInputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a request that the ranks read in addition to its tokens and parameters."""

    adapter: str | None = None
    pooling: PoolingParams | None = None
    """Set if the answer is a vector; ``params`` are then ``NO_SAMPLING``."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings instead of the prompt's ids, for both legs."""

    @property
    def content(self) -> PromptContent | None:
        """Return the content of the prompt in addition to its ids."""
        return self.prompt_embeds

    def inputs(self, *, computes_prompt: bool) -> dict[str, Any]:
        """Return the fields of ModelInputs by name. Content of the prompt is left out unless a rank
        computes any of it."""
        return {
            name: getattr(self, name)
            for name in ModelInputs.__struct_fields__
            if computes_prompt or name not in _CONTENT
        }


class EngineCoreRequest(ModelInputs, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at one request, in token ids.

    Positions and counts start after ``prompt_token_ids``; ``emitted`` is not part of the prompt.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    """Ids of the prompt. A prompt of embeddings has a placeholder id for each vector."""
    params: SamplingParams
    """Parameters with a seed. Stop strings are left to text/."""
    eos_token_ids: tuple[int, ...] = ()
    emitted: tuple[tuple[int, ...], ...] = ()
    """Tokens per choice that a client may have received; not sampled again."""
    finished_choices: tuple[int, ...] = ()
    """Choices that ended in an earlier attempt."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Hashes of the prompt's full blocks; if empty, the worker computes them."""
    cache_salt: str | None = None
    priority: int = 0
    """Priority; lower values are scheduled first."""
    tenant: str = ""
    """Tenant of the request; empty if there is only one."""
    budget_ms: int | None = None
    """Remaining milliseconds when sent; None without a deadline."""
    max_model_len: int | None = None
    """Tokens at which a choice ends, equal for both legs; None is the worker's own."""
    kv: Produce | Consume | None = None
    """None: this worker prefills and decodes."""
    pull: Pull | None = None
    """Worker that may have the prompt's start."""
    watch: Watch | None = None
    """Set if the request's times are recorded."""

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        return self.emitted[choice] if choice < len(self.emitted) else ()
