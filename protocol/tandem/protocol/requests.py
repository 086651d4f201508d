"""Request of a router to a worker to start one attempt."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.protocol.embeds import PromptEmbeds
from tandem.protocol.errors import InvalidParameter
from tandem.protocol.ids import BlockHash, Incarnation, RequestKey
from tandem.protocol.pooling import PoolingParams
from tandem.protocol.sampling import SamplingParams
from tandem.protocol.timeline import Watch


def check_token_ids(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidParameter for the first of ``ids`` that is not from 0 to ``vocab_size`` - 1."""
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
    """The worker prefills, hands its KV over, emits token 1 and ends."""

    consumer: Incarnation
    """The only decode worker that may fetch the KV."""


class Consume(msgspec.Struct, frozen=True, tag="consume"):
    """The worker receives the prompt's KV and token 1 from a prefill worker and continues."""

    producer: Incarnation
    """The prefill worker to fetch from."""


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    """A peer has more of the prompt cached than this worker. Its blocks are fetched, and computed
    here only if that fails or takes longer."""

    holder: Incarnation
    """Worker to fetch from, of either role."""
    num_tokens: int
    """Tokens of the prompt's start that the peer has cached, as far as the router knows."""
    budget_ms: int
    """Expected time to compute them here. After it, they are computed."""
    have: int = 0
    """Tokens of the prompt's start that this worker has cached, as far as the router knows."""


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt at one request, in tokens.

    ``prompt_token_ids`` and ``emitted`` are separate fields: penalties, min and max tokens, usage,
    logprobs and sampling positions all count from the end of the prompt.
    """

    key: RequestKey
    prompt_token_ids: list[int]
    """Token ids of the prompt. A prompt of embeddings has a placeholder for each."""
    params: SamplingParams
    """Sampling parameters with a seed. Stop strings and bad words are ids or left to text/."""
    eos_token_ids: tuple[int, ...] = ()
    emitted: tuple[tuple[int, ...], ...] = ()
    """Tokens per choice that a client may have received: forced, not sampled again. () is none."""
    finished_choices: tuple[int, ...] = ()
    """Choices that ended in an earlier attempt and must not be continued."""
    block_hashes: tuple[BlockHash, ...] = ()
    """Hashes of the prompt's full blocks. If empty, the worker computes them."""
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    """Lower values are scheduled first under the priority policy."""
    tenant: str = ""
    """Tenant of the request; tenants share an engine fairly. Empty if there is only one."""
    budget_ms: int | None = None
    """Rest of the request's deadline when it was sent; None is no deadline."""
    max_model_len: int | None = None
    """Prompt and output tokens at which a choice ends by length. Equal for both legs of a hand-off,
    whose workers may have different limits. None is the worker's own."""
    kv: Produce | Consume | None = None
    """None: this worker prefills and decodes."""
    pull: Pull | None = None
    """Worker from which the worker that computes the prompt may fetch the prompt's start."""
    pooling: PoolingParams | None = None
    """Set if the answer is a vector and no token; ``params`` are then ``NO_SAMPLING``."""
    prompt_embeds: PromptEmbeds | None = None
    """Embeddings in place of the prompt's ids, one vector each. Sent to both legs of a hand-off:
    the decode worker may have to compute the prompt again."""
    watch: Watch | None = None
    """Set if the request's times are to be recorded and sent at its end."""

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        """Return the tokens of ``choice`` that earlier attempts emitted."""
        return self.emitted[choice] if choice < len(self.emitted) else ()
